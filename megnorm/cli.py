"""The command ``megnorm``."""

import os
import sys
from typing import Annotated

import typer

from megnorm import launcher
from megnorm.config import load_config, parse_norm
from megnorm.norms import equations, resolve
from megnorm.norms.page import about_scheme, markdown_page, scheme_list
from megnorm.norms.table import slot_table
from megnorm.prepare import make_run_dir, prepare, with_vocabulary

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Pretrain transformers in which where the norms stand is data.")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the configuration.")]


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="Configuration file (YAML).")],
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    nnodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this machine, from 0.")] = 0,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of machine 0.")] = None,
    resume: Annotated[str, typer.Option(help="auto, none, or a checkpoint's path.")] = "auto",
) -> None:
    """Train, or continue training: exit code 0 done, 2 user's error, 75 stopped by a signal after saving."""
    overrides = overrides or []
    if launcher.is_worker():
        launcher.worker_main(lambda progress: _work(config, overrides, resume, progress))
    launcher.check_nodes(nproc, nnodes, node_rank, rdzv_endpoint)
    prepared = prepare(config, overrides, nproc * nnodes, resume)
    make_run_dir(prepared.config)
    arguments = [config, *overrides, "--resume", resume]
    raise typer.Exit(launcher.launch(arguments, nproc, nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint,
                                     compile=prepared.config.model.norm.backend == "compile"))


@app.command()
def schemes(
    name: Annotated[str | None, typer.Argument(help="A scheme; without, all are listed.")] = None,
    changes: Annotated[list[str] | None, typer.Argument(
        metavar="[KEY=VALUE]...", help="The scheme's options or keys of model.norm: fraction=0.5 kind=layer.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Depth to show.")] = 12,
    hidden: Annotated[int, typer.Option(min=1, help="Width, for factors of the embedding.")] = 1024,
    table: Annotated[bool, typer.Option(help="Print the slots of all schemes as a table.")] = False,
    markdown: Annotated[bool, typer.Option(help="Print the page configs/norms/README.md.")] = False,
) -> None:
    """List the norm schemes, or print the equations of one, layer by layer."""
    if name is not None:
        norm = parse_norm(name, changes or [])
        lines = [*about_scheme(name), *equations(resolve(norm, layers, hidden))]
    else:
        lines = slot_table() if table else markdown_page() if markdown else scheme_list()
    typer.echo("\n".join(lines))


@app.command()
def sample(
    run_dir: Annotated[str, typer.Argument(help="Run directory of a trained model.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to draw.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
) -> None:
    """Continue a prompt with the newest checkpoint of a run."""
    from megnorm.sample import continuation

    typer.echo(prompt + continuation(run_dir, prompt, tokens, temperature, seed))


@app.command()
def parity(
    config: Annotated[str, typer.Argument(help="Configuration file (YAML).")],
    overrides: Overrides = None,
    layouts: Annotated[list[str], typer.Option(help='Layouts to try: "tp=2,sp=true" "pp=2,dp=2,zero_stage=1" ...')] = (
        "tp=2,dp=2", "tp=2,sp=true", "pp=2,dp=2", "dp=2,zero_stage=3"),
    full: Annotated[bool, typer.Option("--full", help="The configuration's real size, not a narrow copy.")] = False,
) -> None:
    """Prove that layouts compute what one process computes: exit code 1 where one differs."""
    loaded = with_vocabulary(load_config(config, overrides or []))
    from megnorm.parity import HEADER, parse_layouts, row, run_parity

    runs = parse_layouts(loaded, list(layouts), full)
    typer.echo("largest relative differences from one process in plain torch (loss and norm of 9 steps, each "
               "gradient, each weight), fp32\n" + HEADER)
    agree = True
    for text, layout, verdict in run_parity(runs):
        typer.echo("\n".join([row(text, layout, verdict), *(f"    {fault}" for fault in verdict.faults)]))
        agree = agree and verdict.agrees
    raise typer.Exit(0 if agree else 1)


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="Configuration file (YAML).")],
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="Devices.")] = 1,
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of each; default: of the hardware.")] = None,
    hardware: Annotated[str, typer.Option(help="a100, h100, h200, b200, or cpu, measured here.")] = "h100",
    top: Annotated[int, typer.Option(min=1, help="How many layouts and reasons to show.")] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build every rank's part of the configuration's own "
                                          "layout on the meta device, and report each stage.")] = False,
) -> None:
    """Parameters, FLOPs, memory by part, and which layouts fit, fastest first."""
    from megnorm.plan.hardware import find_hardware, with_memory

    loaded = with_vocabulary(load_config(config, overrides or []))
    device = with_memory(find_hardware(hardware), gpu_memory)
    if dry_run:
        from megnorm.dry_run import report_lines, run_dry

        typer.echo("\n".join(report_lines(loaded, *run_dry(loaded, gpus, device.device))))
    else:
        from megnorm.plan.layouts import search_layouts
        from megnorm.plan.page import plan_page

        typer.echo("\n".join(plan_page(loaded, search_layouts(loaded, gpus, device), gpus, device, top)))


@app.command()
def ladder(
    overrides: Overrides = None,
    first: Annotated[str, typer.Option("--from", help="Smallest size, as 20M.")] = "20M",
    last: Annotated[str, typer.Option("--to", help="Largest size, as 7B.")] = "7B",
    per_decade: Annotated[int, typer.Option(help="Sizes for each factor of ten.")] = 4,
    rule: Annotated[list[str] | None, typer.Option(
        metavar="KEY=VALUE", help="Change a rule: count, aspect, head_size, queries_per_kv, ffn_ratio, "
        "vocabulary, sequence_length, tokens_per_parameter, rate (step-law, deepseek, paper), scheme.")] = None,
    yaml: Annotated[bool, typer.Option("--print", help="Print the configurations.")] = False,
    output: Annotated[str | None, typer.Option(help="Folder to write the configurations into.")] = None,
) -> None:
    """Configurations of sizes between two, evenly spaced on a logarithmic scale, by stated rules."""
    from megnorm.plan.ladder import ladder_table, ladder_text, make_ladder, read_rules, write_ladder

    configs = make_ladder(first, last, per_decade, read_rules(rule or []), overrides or [])
    typer.echo(ladder_text(configs) if yaml else "\n".join(ladder_table(configs)))
    if output is not None:
        typer.echo(f"{len(write_ladder(configs, output))} configurations in {output}")


@app.command()
def fit(
    results: Annotated[str, typer.Argument(help="Results as .csv, .json or .jsonl, or a sweep's directory.")],
    form: Annotated[str, typer.Option(help="chinchilla, power or kaplan.")] = "chinchilla",
    budget: Annotated[list[float] | None, typer.Option(help="FLOPs to give the optimum for, as 1e21.")] = None,
    draws: Annotated[int, typer.Option(help="Draws of runs for the intervals.")] = 200,
    output: Annotated[str | None, typer.Option(help="File for the whole analysis as JSON.")] = None,
) -> None:
    """Fit a scaling law to finished runs, say how sure it is, and compare the schemes at equal compute."""
    from megnorm.scaling.commands import fit_command

    typer.echo("\n".join(fit_command(results, form, budget or None, draws, output)))


@app.command()
def sweep(
    words: Annotated[list[str], typer.Argument(
        metavar="SWEEP.yaml | status SWEEP.yaml | run CELL", help="A sweep to start or continue; its table; one cell.")],
    backend: Annotated[str, typer.Option(help="local, slurm (job arrays) or print (the commands).")] = "local",
    max_parallel: Annotated[int, typer.Option(help="Cells at a time.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print costs and scripts, and write nothing.")] = False,
    job: Annotated[str, typer.Option(help="Number of the Slurm job, for the cell's status.")] = "",
) -> None:
    """Run a grid of configurations; the same command again continues. Exit code 0 all done, 1 some failed."""
    from megnorm.scaling.commands import sweep_command

    raise typer.Exit(sweep_command(words, backend, max_parallel, dry_run, job, with_vocabulary, os.environ,
                                   launcher.usable_cores()))


@app.command()
def report(
    directory: Annotated[str, typer.Argument(help="Folder of a sweep.")],
    form: Annotated[str, typer.Option(help="chinchilla, power or kaplan.")] = "chinchilla",
    budget: Annotated[list[float] | None, typer.Option(help="FLOPs to give the optimum for, as 1e21.")] = None,
    draws: Annotated[int, typer.Option(help="Draws of runs for the intervals.")] = 200,
) -> None:
    """Write a sweep's report.html, its results, its fit and its figures into its folder."""
    from megnorm.scaling.report import write_report

    typer.echo("\n".join(str(path) for path in write_report(directory, form, budget or None, draws)))


def spread_layouts(arguments: list[str]) -> list[str]:
    """``--layouts A B C`` as ``--layouts A --layouts B --layouts C``, the form that the parser knows."""
    spread, following = [], False
    for argument in arguments:
        if argument.startswith("-"):
            following = False
        if following and spread[-1] != "--layouts":
            spread.append("--layouts")
        spread.append(argument)
        following = following or argument == "--layouts"
    return spread


def _work(config: str, overrides: list[str], resume: str, progress: launcher.Progress) -> int:
    prepared = prepare(config, overrides, int(os.environ["WORLD_SIZE"]), resume)
    from megnorm.worker import work

    return work(prepared, resume, int(os.environ.get("LOCAL_RANK", 0)), progress.set)


def main() -> None:
    """Entry point: a user's error is one line on standard error and exit code 2."""
    try:
        app(args=spread_layouts(sys.argv[1:]))
    except ValueError as error:
        code, expected = launcher.exit_code_of(error)
        if not expected:
            raise
        print(f"megnorm: {error}", file=sys.stderr)
        sys.exit(code)
