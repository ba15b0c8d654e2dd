"""`tunebook chat`: talk to a run or a model in the terminal, with the run's own tokenizer, template and system prompt.

evaluate.target (what was named) -> loading (the model on its device) -> session (history, what fits into the context)
-> answering (tokens to streamed text), shown by `terminal`, or by `command` where there is one question only.
"""

from tunebook.evaluate.chat.command import chat_command

__all__ = ["chat_command"]
