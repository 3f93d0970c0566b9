"""The fast path: Llama-shaped models on a CPU, without transformers' model code.

Only `services.engine.runner.open_runner` knows that this package exists, and does without it where it is not there.
"""

from services.engine.fast.llama import open_fast

__all__ = ["open_fast"]
