"""Evaluation by lm-evaluation-harness with the run's own weights, tokenizer and chat template.

command checks the request and starts worker in its own process. placement chooses its GPUs. There, evaluation goes
through task_files -> harness -> results. request_model answers in batches that fit, a share of the requests in each
process, and keeps the answers of finished tasks.
"""
