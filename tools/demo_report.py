"""What a run learned: its validation loss beside counting models fitted on the tokens that it saw, a sampled
continuation, the loss curve, and what to try next. Writes RUN_DIR/report.json and RUN_DIR/loss.png."""

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megnorm.config import Config, load_config
from megnorm.data.datasets import open_datasets
from megnorm.data.meta import read_meta
from megnorm.observe.baselines import fit_baselines
from megnorm.observe.humanize import count
from megnorm.observe.metrics import read_metrics
from megnorm.observe.plot import plot_runs


def last_evaluation(run_dir: Path) -> tuple[int, float]:
    """(step, loss) of the last validation. Raises ValueError for a run without one."""
    rows = [row for row in read_metrics(run_dir) if row.get("split") == "valid"]
    if not rows:
        raise ValueError(f"{run_dir}: metrics.jsonl holds no validation loss; "
                         "train with train.eval_every above 0 and with data.valid")
    return rows[-1]["step"], rows[-1]["loss"]


def samples(dataset, number: int) -> np.ndarray:
    """The first ``number`` samples of a dataset, [number, s + 1]."""
    return np.stack([np.asarray(dataset[n]) for n in range(number)])


def bytes_per_token(config: Config) -> float | None:
    """UTF-8 bytes of the validation texts per token, by the datasets' sidecars; None where one is missing."""
    sources = config.data.valid or config.data.sources
    metas = [(weight, read_meta(prefix)) for weight, prefix in sources]
    if not all(meta is not None and meta.tokens and meta.text_bytes for _, meta in metas):
        return None
    total = sum(weight for weight, _ in metas)
    return sum(weight / total * meta.text_bytes / meta.tokens for weight, meta in metas)


def make_report(config: Config, step: int, loss: float, train, valid) -> dict:
    """Losses in nats per token, bits per byte, and baselines fitted on the samples of ``step`` steps.

    train, valid: datasets by global sample number; evaluation is over the first eval_samples of valid, or
    one epoch where that is less.
    """
    held_out = min(config.train.eval_samples, getattr(valid, "samples_per_epoch", config.train.eval_samples))
    fitted = fit_baselines(samples(train, step * config.train.global_batch), samples(valid, held_out),
                           config.model.vocab_size)
    size = bytes_per_token(config)
    return {
        "step": step,
        "tokens": step * config.tokens_per_step,
        "validation_loss": loss,
        "bits_per_byte": loss / math.log(2) / size if size else None,
        "bytes_per_token": size,
        "baselines": {"unigram": fitted.unigram, "bigram": fitted.bigram, "discount": fitted.discount,
                      "train_tokens": fitted.train_tokens, "valid_tokens": fitted.valid_tokens},
        "below_bigram": loss < fitted.bigram,
    }


def table(report: dict) -> list[str]:
    """The report as lines for people."""
    baselines, loss, size = report["baselines"], report["validation_loss"], report["bytes_per_token"]
    lines = [f"after {report['step']:,} steps, {count(report['tokens'])} tokens", "",
             f"  {'':<22}{'nats/token':>12}{'bits/byte':>12}"]
    for name, value in (("unigram", baselines["unigram"]), ("bigram, discounted", baselines["bigram"]),
                        ("this model, validation", loss)):
        bits = f"{value / math.log(2) / size:12.3f}" if size else f"{'-':>12}"
        lines.append(f"  {name:<22}{value:12.4f}{bits}")
    gap = baselines["bigram"] - loss
    verdict = ("below the bigram: the model uses more of the context than the last token" if gap > 0 else
               "above the bigram: train longer")
    return [*lines, "", f"  {abs(gap):.3f} nats {verdict}"]


def next_commands(run_dir: Path, config_file: Path, steps: int) -> list[tuple[str, str]]:
    """(what it shows, command): another scheme, another layout, the same run longer."""
    beside = Path(os.path.relpath(Path(sys.executable).parent / "megnorm"))
    megnorm = "megnorm" if shutil.which("megnorm") or not beside.exists() else str(beside)
    train = f"{megnorm} train {config_file}"
    return [
        ("another norm scheme", f"{train} model.norm=peri run_dir={run_dir}-peri --nproc 2"),
        ("tensor parallel, the same losses", f"{train} parallel.tp=2 run_dir={run_dir}-tp2 --nproc 2"),
        ("this run, resumed for twice the steps", f"{train} train.steps={2 * steps} --nproc 2"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--config", type=Path, metavar="YAML", help="for the commands printed at the end "
                        "(default: RUN_DIR/config.yaml)")
    parser.add_argument("--prompt", default="import os\n\n\ndef", help="text to continue")
    parser.add_argument("--sample-tokens", type=int, default=80, metavar="N",
                        help="length of the continuation (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling (default: %(default)s)")
    args = parser.parse_args(arguments)
    try:
        report_run(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report_run(args: argparse.Namespace) -> None:
    """Compute, print, write. Raises ValueError for a run that can't be reported on."""
    from megnorm.sample import continuation  # brings torch, which --help can do without

    config = load_config(args.run_dir / "config.yaml")
    step, loss = last_evaluation(args.run_dir)
    data = open_datasets(config)
    report = make_report(config, step, loss, data.train, data.valid)
    print("\n".join(table(report)))
    text = continuation(str(args.run_dir), args.prompt, args.sample_tokens, args.temperature)
    report["sample"] = {"prompt": args.prompt, "continuation": text, "temperature": args.temperature}
    print(f"\nA continuation, sampled at temperature {args.temperature:g}:\n")
    print("\n".join(f"  | {line}" for line in (args.prompt + text).splitlines()))
    (args.run_dir / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n",
                                              encoding="utf-8")
    plot_runs([args.run_dir], args.run_dir / "loss.png")
    print(f"\nLoss curve: {args.run_dir / 'loss.png'}   numbers: {args.run_dir / 'report.json'}\n\nTry next:")
    config_file = args.config or args.run_dir / "config.yaml"
    for title, command in next_commands(args.run_dir, config_file, config.total_steps):
        print(f"  # {title}\n  {command}")


if __name__ == "__main__":
    sys.exit(main())
