"""`diptych generate`: asks a running mesh and streams its answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
import grpc
from diptych.v1 import gateway_pb2, gateway_pb2_grpc, request_pb2

from services.cli.calls import channel_to
from services.cli.phases import FINISH_WORDS, PhaseValues, phase_table, phase_values
from services.cli.tables import table_console
from services.engine.sampling_spec import MAX_LOGPROBS


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: request_pb2.Usage
    phases: PhaseValues
    logprobs: tuple[request_pb2.TokenLogprobs, ...] = ()

    def as_json(self) -> str:
        """One line: text, token_ids, finish_reason, usage, phases, and logprobs where they were asked for."""
        usage = {
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
        }
        whole: dict[str, object] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "usage": usage,
            "phases": self.phases,
        }
        if self.logprobs:
            whole["logprobs"] = [
                {"logprob": one.logprob, "top": list(zip(one.top_token_ids, one.top_logprobs, strict=True))}
                for one in self.logprobs
            ]
        return json.dumps(whole, ensure_ascii=False)


@click.command()
@click.argument("prompt")
@click.option("--grpc", "address", default="127.0.0.1:50051", show_default=True, help="The gateway, HOST:PORT.")
@click.option("--model", default="", help="Served model; empty is the only one there is.")
@click.option("--max-tokens", default=0, type=click.IntRange(0, 2**32 - 1), help="0: as many as the context allows.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, help="Keep the smallest set of tokens this probable together.")
@click.option("--top-k", default=0, type=click.IntRange(0, 2**32 - 1), help="Keep this many tokens; 0 is off.")
@click.option("--min-p", default=0.0, help="Drop tokens less probable than this times the best; 0 is off.")
@click.option("--repetition-penalty", type=float, help="Above 1: tokens of prompt and answer become less probable.")
@click.option("--presence-penalty", default=0.0, help="Taken off the logits of the answer's tokens; -2 to 2.")
@click.option("--frequency-penalty", default=0.0, help="The same for each time they stand in it; -2 to 2.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, MAX_LOGPROBS),
    help="With --json: each token's log-probability and so many alternatives.",
)
@click.option(
    "--answers", default=1, type=click.IntRange(1), help="Answers to the same prompt, with seeds of their own."
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="The same seed gives the same answer.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on to --max-tokens.")
@click.option("--chat/--raw", default=True, help="PROMPT is a user's message (default), or plain text to continue.")
@click.option(
    "--limit-s",
    default=600.0,
    type=click.FloatRange(0, min_open=True),
    show_default=True,
    help="Give up after so many seconds.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="A line of JSON per answer with text, usage and phases; nothing else."
)
def generate(prompt: str, address: str, chat: bool, limit_s: float, as_json: bool, **values: object) -> None:
    """Asks a running mesh for an answer to PROMPT ("-" reads it from stdin).

    The text streams to stdout, that of several answers when it is whole; a table of where the time went (of the first
    answer) follows on stderr.
    """
    request = build_request(sys.stdin.read() if prompt == "-" else prompt, chat=chat, **values)  # type: ignore[arg-type]  # click made the types
    streams = not as_json and request.answers <= 1
    with channel_to(address) as channel:
        answers = ask_all(channel, request, limit_s=limit_s, on_text=_echo if streams else lambda text: None)
    if as_json:
        for answer in answers:
            click.echo(answer.as_json())
        return
    if not streams:
        click.echo("\n".join(f"[{i} of {len(answers)}] {answer.text}" for i, answer in enumerate(answers, 1)), nl=False)
    click.echo()
    table_console(stderr=True).print(phase_table(answers[0].usage, answers[0].phases))


def build_request(
    prompt: str,
    *,
    chat: bool = True,
    model: str = "",
    max_tokens: int = 0,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logprobs: int | None = None,
    answers: int = 1,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> gateway_pb2.GenerateRequest:
    """The request for one prompt; what was not given stays absent."""
    sampling = request_pb2.SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
    )
    request = gateway_pb2.GenerateRequest(
        model=model, sampling=sampling, max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos, answers=answers
    )
    if chat:
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt
    return request


def ask(
    channel: grpc.Channel,
    request: gateway_pb2.GenerateRequest,
    *,
    limit_s: float,
    on_text: Callable[[str], None],
) -> Answer:
    """Asks for one answer, see `ask_all`."""
    (answer,) = ask_all(channel, request, limit_s=limit_s, on_text=on_text)
    return answer


def ask_all(
    channel: grpc.Channel,
    request: gateway_pb2.GenerateRequest,
    *,
    limit_s: float,
    on_text: Callable[[str], None],
) -> list[Answer]:
    """Sends the request and gives `on_text` every piece of text as it comes. Raises grpc.RpcError."""
    call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=limit_s)
    parts: list[list[gateway_pb2.GenerateResponse]] = [[] for _ in range(request.answers or 1)]
    try:
        for message in call:
            if message.text:
                on_text(message.text)
            parts[message.index].append(message)
    finally:
        call.cancel()  # type: ignore[no-untyped-call]  # no effect on a call that has ended
    return [_answer(messages) for messages in parts]


def _answer(messages: Sequence[gateway_pb2.GenerateResponse]) -> Answer:
    if not messages or not messages[-1].HasField("finish"):
        raise click.ClickException("the answer broke off without saying how it ended")
    finish = messages[-1].finish
    return Answer(
        text="".join(message.text for message in messages),
        token_ids=tuple(token_id for message in messages for token_id in message.token_ids),
        finish_reason=FINISH_WORDS[finish.reason],
        usage=finish.usage,
        phases=phase_values(finish.phases),
        logprobs=tuple(logprobs for message in messages for logprobs in message.logprobs),
    )


def _echo(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()
