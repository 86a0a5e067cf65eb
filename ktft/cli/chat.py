"""`ktft chat`: a conversation with a running server, or with a server that the command starts.

`vllm chat` talks to a running server, too. But it cannot start a server, change the adapter, set sampling options or
clear the conversation, and it ends at the first error. openai is imported when the command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ktft.config import API_KEY_ENV

if TYPE_CHECKING:
    from ktft.serve.runtime.settings import ServeSettings

HELP = """/system TEXT       what the model is told first; without TEXT nothing
/clear             forget the conversation
/adapter NAME DIR  serve the adapter in the server's directory DIR; /adapter off serves the base
/exit              end"""


def chat(
    target: Annotated[
        str, typer.Argument(metavar="[URL | MODEL]", help="A server's address, or a model's directory to start one.")
    ] = "http://127.0.0.1:8000",
    name: Annotated[str | None, typer.Option("--model", help="Model to ask for. [the one that is served]")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. [the server's]")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling. [the server's]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer. [what fits]")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Number that fixes which answer is drawn; the same one gives the same answer again. [random]"
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar=API_KEY_ENV, help="The server's key.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="With MODEL: an adapter to serve.")] = None,
    expert_format: Annotated[str | None, typer.Option(help="With MODEL: as in ktft serve.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="With MODEL: as in ktft serve.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="With MODEL: as in ktft serve.")] = None,
) -> None:
    """Talk to a model: each line is a message, answers come as they are written. /help lists commands.

    Lines of a pipe work too. Exits with 1 if an answer failed there, 2 on bad input.
    """
    console = Console(stderr=True)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    server: AbstractContextManager[str] = nullcontext(target)
    if "://" not in target:
        from ktft.cli.serve import named_adapters
        from ktft.serve.runtime.settings import ServeSettings

        adapters = named_adapters([str(adapter)] if adapter else ())
        name = name or (adapters[0][0] if adapters else None)
        settings = ServeSettings(
            str(Path(target)),
            adapters=adapters,
            adapter_swap=True,
            expert_format=expert_format,
            threads=threads,
        )
        server = _started(settings, max_model_len, console)
    elif adapter or expert_format or threads or max_model_len:
        raise ValueError(f"{target} is a running server: --adapter and the like are for a MODEL directory")
    with server as address:
        failures = Conversation(_client(address, api_key), console, name, sampling, system).run()
    raise typer.Exit(int(failures > 0 and not sys.stdin.isatty()))


def _started(settings: ServeSettings, max_model_len: int | None, console: Console) -> AbstractContextManager[str]:
    """A server for this conversation alone, at a free port of this machine."""
    import socket

    from ktft.cli.serve import started
    from ktft.serve.engine import Options

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return started(settings, Options(port=port, max_model_len=max_model_len, max_num_seqs=1), console)


def _client(address: str, api_key: str | None) -> Any:
    try:
        import openai
    except ModuleNotFoundError:
        raise ValueError("openai is not installed, which ktft chat talks with; run: pip install openai") from None
    base = address.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    return openai.OpenAI(base_url=base, api_key=api_key or "none", max_retries=0)


@dataclass
class Conversation:
    """One user's messages and the answers.

    Attributes:
        client: openai's client of the server.
        errors: where errors and notes go; answers go to standard output.
        name: the model's name; None takes the model that is served.
        sampling: OpenAI's parameters; the server chooses where the value is None.
    """

    client: Any
    errors: Console
    name: str | None
    sampling: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> int:
        """Talk until the input ends or the user leaves. Returns the number of messages that failed."""
        if self.name is None:
            try:
                self.name = self.client.models.list().data[0].id
            except self._failures() as error:
                raise ValueError(f"{self.client.base_url}: {_one_line(error)}") from None
        if sys.stdin.isatty():
            self._note(f"{self.name} at {self.client.base_url}. /help lists commands, /exit ends.")
        failures = 0
        for line in _lines():
            if line in ("/exit", "/quit"):
                break
            try:
                self._command(line) if line.startswith("/") else self._say(line)
            except self._failures() as error:
                failures += 1
                self.errors.print(Text(_one_line(error), style="red"), soft_wrap=True)
        return failures

    def _failures(self) -> tuple[type[Exception], ...]:
        import openai

        return (openai.OpenAIError, ValueError)

    def _note(self, text: str) -> None:
        self.errors.print(Text(text, style="dim"), soft_wrap=True)

    def _command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        words = rest.split()
        if command == "/system":
            self.system = rest.strip() or None
        elif command == "/clear":
            self.messages.clear()
        elif command == "/adapter" and words == ["off"]:
            self._change("/unload_lora_adapter", {"lora_name": self.name})
        elif command == "/adapter" and len(words) == 2:
            self._change("/load_lora_adapter", {"lora_name": words[0], "lora_path": words[1]})
        elif command == "/help":
            self._note(HELP)
        else:
            raise ValueError(f"{line}: there is no such command; /help lists them")

    def _change(self, path: str, body: dict[str, Any]) -> None:
        self.name = self.client.post(path, cast_to=object, body=body)["model"]
        self._note(f"{self.name} is served")

    def _say(self, line: str) -> None:
        """Send a message and print the answer as it comes. A message that fails is not remembered."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        mine = {"role": "user", "content": line}
        given = {key: value for key, value in self.sampling.items() if value is not None}
        stream = self.client.chat.completions.create(
            model=self.name, messages=[*first, *self.messages, mine], stream=True, **given
        )
        answer = ""
        try:
            for chunk in stream:
                text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                answer += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:  # the user has read enough of this answer
            stream.close()
        finally:
            print(flush=True)
        self.messages += [mine, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """The lines that the user writes, without empty ones."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  # arrow keys and history
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if not terminal and not line:
            return
        if line.strip():
            yield line.strip()


def _one_line(error: Exception) -> str:
    """The server's message, or the reason why it was not reached, as one line."""
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, dict) else None
    cause = error.__cause__
    text = message or (f"{error} ({cause})" if cause else str(error))
    return " ".join(str(text).split())
