"""Check a recipe's tokenizer and chat template, if they are on this machine, for problems in training or serving."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunebook.config.choices import Format
from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import RunConfig
from tunebook.doctor.findings import Finding, Kind
from tunebook.doctor.probes import Probe, run_probe

_TIMEOUT_S = 120.0  # importing transformers takes 10 s on a cold disk, a tokenizer of 250,000 words some more
_WITHOUT_TEMPLATE = (Format.text, Format.pretokenized, Format.prompt_completion)


def probe_tokenizer(config: RunConfig) -> Probe:
    """Load a recipe's tokenizer in its own process, from this machine alone."""
    with tempfile.TemporaryDirectory(prefix="tunebook-doctor-") as name:
        file = Path(name) / "run.yaml"
        file.write_text(config_to_yaml(config), encoding="utf-8")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        return run_probe("tokenizer", str(file), timeout_s=_TIMEOUT_S, variables=offline)


def check_tokenizer(config: RunConfig, probe: Probe) -> list[Finding]:
    """Return the findings from the probe's answer."""
    facts = probe.facts
    if facts is None:
        return [
            Kind.tokenizer.error(
                id="tokenizer",
                what=f"the tokenizer cannot be inspected: {probe.problem}",
                fix="tunebook data with the same recipe shows all of the error",
            )
        ]
    if not facts["is_here"]:
        name = config.model.tokenizer or config.model.name
        what = f"the tokenizer of {name} is not on this machine, so it was not checked"
        return [Kind.tokenizer.ok(id="tokenizer", what=what)]
    if facts["problem"] is not None:
        return [_broken(facts["problem"])]
    what = f"end of text {facts['eos']}, padding {facts['pad']}, beginning {facts['bos']} ({facts['folder']})"
    data = {key: facts[key] for key in ("eos", "pad", "bos")}
    return [Kind.tokenizer.ok(id="tokenizer", what=what, data=data), *_template(config, facts["template"])]


def _broken(problem: dict[str, Any]) -> Finding:
    id = problem["id"] or "tokenizer"
    return Kind.tokenizer.error(id=id, what=problem["message"], fix=f"tunebook explain {id}")


def _template(config: RunConfig, facts: dict[str, Any]) -> Iterator[Finding]:
    if not facts["is_there"]:
        yield _no_template(config)
        return
    if facts["problem"] is not None:
        yield _broken(facts["problem"])
        return
    yield _markers(facts)
    yield from _bos(facts)


def _no_template(config: RunConfig) -> Finding:
    if config.dataset.format in _WITHOUT_TEMPLATE:
        what = f"no chat template, and dataset.format={config.dataset.format.name} needs none"
        return Kind.tokenizer.ok(id="tokenizer-template", what=what)
    return Kind.tokenizer.warning(
        id="tokenizer-template",
        what="the tokenizer has no chat template: conversations cannot be written as text",
        fix="model.chat_template=FILE (book:recipes/quickstart/model/chat_template.jinja is ChatML); plain text needs "
        "none",
    )


def _markers(facts: dict[str, Any]) -> Finding:
    """Check that the template marks the assistant's answers. Unmarked answers are not trained on."""
    found, answers = facts["num_found"], facts["num_answers"]
    if facts["is_marked"]:
        how = "the chat template marks the assistant's text with {% generation %}"
    else:
        how = (
            "the chat template has no {% generation %} markers: the assistant's text is found by comparing the text "
            "with and without it"
        )
    data = {"is_marked": facts["is_marked"], "num_answers": answers, "num_found": found}
    if found == answers:
        what = f"{how}; tried on {answers} answers"
        return Kind.tokenizer.ok(id="tokenizer-template", what=what, data=data)
    return Kind.tokenizer.warning(
        id="tokenizer-template",
        what=f"{how}; of {answers} answers in one conversation {found} were found, because it writes earlier ones in "
        "another way once more follow: those are not trained on",
        fix="model.chat_template=FILE with {% generation %} ... {% endgeneration %} around the assistant's text",
        data=data,
    )


def _bos(facts: dict[str, Any]) -> Iterator[Finding]:
    """Report a doubled BOS token: from the template alone, or from the template and a tokenizer that adds one."""
    written, added = facts["leading_bos"], facts["leading_bos_if_added"]
    data = {"leading_bos": written, "leading_bos_if_added": added}
    if written > 1:
        yield Kind.tokenizer.error(
            id="bos-doubled",
            what=f"the chat template begins a conversation with {written} BOS tokens, which no model was pretrained on",
            fix="model.chat_template=FILE with the token once",
            data=data,
        )
    elif written == 1 and added > 1:
        yield Kind.tokenizer.warning(
            id="tokenizer-adds-bos",
            what="the chat template writes the BOS token and the tokenizer adds another to any text. Here "
            "conversations are tokenized without adding; a program that renders and then tokenizes gets two",
            fix="add_special_tokens=False wherever rendered conversations are tokenized, also to serve the model",
            data=data,
        )
    else:
        what = f"a conversation begins with {written or 'no'} BOS token, also where the tokenizer may add its own"
        yield Kind.tokenizer.ok(id="tokenizer-adds-bos", what=what, data=data)
