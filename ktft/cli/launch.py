"""The process of `ktft train`: LLaMA-Factory's own command, with each refusal shown as one message."""

from __future__ import annotations

import runpy

from ktft import errors

if __name__ == "__main__":
    errors.install()
    runpy.run_module("llamafactory.cli", run_name="__main__", alter_sys=True)
