"""Evaluation by lm-evaluation-harness, bound to the run's own weights, tokenizer and chat template.

task_files -> conversations -> harness -> results, put together by `worker` (a process of its own) and started by
`command`.
"""
