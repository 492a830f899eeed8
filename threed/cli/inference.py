"""The verbs of the command line that show what a run has learned: generate, eval."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from threed.cli.options import exclude
from threed.data.sampling import Sampling

RunPath = Annotated[Path, typer.Argument(metavar="RUN",
                                         help="the run.dir of a run, or one of its checkpoints")]
Overrides = Annotated[list[str] | None,
                      typer.Argument(metavar="[KEY=VALUE]...", help="overrides of the mesh, such as "
                                                                    "parallel.tp=4; default: one process")]
Checkpoint = Annotated[str | None, typer.Option(metavar="STEP|PATH", help="default: the newest")]
TokenizerFile = Annotated[Path | None, typer.Option("--tokenizer", metavar="FILE",
                                                    help="a tokenizer.json; default: that of the run's data")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else")]
HELP_PROMPT = "beginning of a text; give it several times for several texts (default: train.sample_prompts)"

HELP_CHAT = ("whether a prompt is what a user says, written by the tokenizer's chat template (default: "
             "whether the run's data are conversations, data.loss_mask=chat)")

def generate(context: typer.Context, run: RunPath, overrides: Overrides = None,
             prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help=HELP_PROMPT)] = None,
             max_tokens: Annotated[int, typer.Option(help="most tokens that are added to a prompt")]
             = Sampling().tokens,
             temperature: Annotated[float, typer.Option(help="0: always the most likely token; 1: as likely "
                                                             "as the model says")] = Sampling().temperature,
             top_p: Annotated[float, typer.Option(help="choose among the most likely tokens that have this "
                                                       "probability together")] = Sampling().top_p,
             seed: Annotated[int, typer.Option(help="other numbers give other texts")] = Sampling().seed,
             chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help=HELP_CHAT,
                                                       show_default=False)] = None,
             checkpoint: Checkpoint = None, tokenizer: TokenizerFile = None, as_json: Json = False) -> None:
    """Continue texts with the weights of a run, on any mesh.

    A text ends at an end-of-text token (of a chat, at the end of the turn), or after --max-tokens. Each new
    token costs a forward of a whole sequence: there is no cache of keys and values. Every mesh chooses the
    same tokens for a seed.
    """
    from threed.api import inference

    if temperature == 0:
        exclude(context, "--temperature 0", "top_p", "seed", why="it takes the most likely token, always")
    how = Sampling(max_tokens, temperature, top_p, seed)
    done = inference.generate(run, prompt or (), how, checkpoint, tokenizer, overrides, chat)
    print(json.dumps(done, indent=1) if as_json else show_texts(done))


def evaluate(run: RunPath, overrides: Overrides = None,
             data: Annotated[str | None, typer.Option(metavar="SOURCE", help="as data.source; default: what "
                                                                             "the run has held out")] = None,
             limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="most sequences")] = None,
             checkpoint: Checkpoint = None, tokenizer: TokenizerFile = None, as_json: Json = False) -> None:
    """Measure the loss and the perplexity of a run's weights on data, on any mesh.

    Text is cut into sequences of model.seq_len tokens, in order; each token counts once.
    """
    from threed.api import inference

    done = inference.evaluate(run, data, limit, checkpoint, tokenizer, overrides)
    print(json.dumps(done, indent=1) if as_json else show_loss(done))


def show_texts(done: dict[str, Any]) -> str:
    """What `generate` has returned, as text: of a single prompt, nothing but prompt and text."""
    print(f"{done['checkpoint']}, step {done['step']}", file=sys.stderr)
    lines = []
    for number, sample in enumerate(done["samples"]):
        if len(done["samples"]) > 1:
            end = ", which ends here" if sample["ended"] else ""
            lines.append(f"--- prompt {number}, {len(sample['tokens'])} tokens{end}")
        lines.append(sample["prompt"] + ("\n" if done["chat"] else "") + sample["text"])
    return "\n".join(lines)


def show_loss(done: dict[str, Any]) -> str:
    """What `evaluate` has returned, as text."""
    left_out = f"; {done['left_out']} do not fill a micro-batch on every rank" if done["left_out"] else ""
    perplexity = f"{done['perplexity']:.4f}" if done["perplexity"] is not None else "too large for a number"
    return (f"loss        {done['loss']:.6f}\nperplexity  {perplexity}\n"
            f"tokens      {done['tokens']} in {done['sequences']} sequences{left_out}\n"
            f"data        {done['data']}\ncheckpoint  {done['checkpoint']}, step {done['step']}")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("generate", short_help="continue texts with the weights of a run")(generate)
    app.command("eval", short_help="loss and perplexity of a run's weights on data")(evaluate)
