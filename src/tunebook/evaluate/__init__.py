"""Evaluation by lm-evaluation-harness, bound to the run's own weights, tokenizer and chat template.

command starts worker, a process of its own, for which spread chooses the GPUs. There evaluation goes through
task_files -> conversations -> harness -> task_runs (each task: taken from parts, or run) -> results, and request_model
answers: in batches that fit (batch_size), with other processes' help (helpers, helping).
"""
