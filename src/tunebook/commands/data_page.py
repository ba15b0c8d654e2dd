"""`tunebook data --page FILE`: samples of the documents as one HTML file, with their images in it, small."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment

from tunebook.data.images import thumbnail
from tunebook.data.prepared import Prepared
from tunebook.data.sampler import IMAGES
from tunebook.data.view import collapsed_pieces, histogram_lines, sides, summary_lines, titled_samples
from tunebook.files import atomic_write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .8rem; border-radius: 6px; }
mark { background: #b9ecc4; } img { margin: 0 .4rem .4rem 0; border-radius: 4px; }
</style>
<h1>{{ title }}</h1>
<pre>{{ facts }}</pre>
<p>What the loss counts is <mark>marked</mark>.</p>
{% for sample in samples %}
<h2>{{ sample.title }}</h2>
{% for image in sample.images %}<img src="{{ image }}" alt="">{% endfor %}
{% for name, pieces in sample.sides -%}
{% if name %}<h3>{{ name }}</h3>
{% endif -%}
<pre>{% for text, is_trained in pieces %}{% if is_trained %}<mark>{{ text }}</mark>{% else %}{{ text }}{% endif %}
{%- endfor %}</pre>
{% endfor %}{% endfor %}
</html>
"""


def write_page(prepared: Prepared, tokenizer: PreTrainedTokenizerBase | None, file: Path, num_samples: int) -> None:
    """Write the page of some prepared data. Raises: OSError."""
    facts, samples = summary_lines(prepared), []
    for name, part in prepared.parts().items():
        facts += ["", *histogram_lines(name, part, prepared.unit)]
        for title, row in titled_samples(name, part, num_samples):
            texts = [(side, collapsed_pieces(ids, labels, tokenizer)) for side, ids, labels in sides(row)]
            images = [thumbnail(reference) for reference in row.get(IMAGES) or ()]
            samples.append({"title": title, "images": images, "sides": texts})
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    title = ", ".join(record.location for record in prepared.records)
    atomic_write_text(file, template.render(title=title, facts="\n".join(facts), samples=samples))
