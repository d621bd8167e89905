"""The schemes for readers: a list, one scheme's head, the page configs/norms/README.md."""

from megnorm.config import NormConfig
from megnorm.norms.equations import equations
from megnorm.norms.resolve import resolve
from megnorm.norms.scheme import Scheme
from megnorm.norms.schemes import ALIASES, SCHEMES, find_scheme
from megnorm.norms.table import DEPTH, KEY, WIDTH, table_rows

INTRO = """# Norm schemes

Written by `python -m megnorm schemes --markdown`; a test compares it with the code.

A sublayer, attention or FFN, computes

    h = in_norm(x)
    r = h if residual_from is "normed" else x
    x = post_norm(residual_scale * r + branch_scale * out_norm(body(h)))

and an absent slot is the identity. A scheme fills the slots of every layer:

```yaml
model:
  norm: hybrid_star                                    # a scheme
  norm: {scheme: mix_ln, options: {fraction: 0.5}}     # with its options
  norm: {scheme: deepnorm, kind: rms, eps: 1e-6}       # with another norm in its slots
  norm:                                                # with other slots in some layers
    scheme: pre
    embed_norm: default                                # embed_scale, final_norm, streams, attention_scale,
    final_softcap: 30                                  # attention_softcap, final_softcap
    overrides:                                         # "0", "-1", "4:8", ":", "first 2", "last 25%"
      "0": {attention: {out_norm: default}, ffn: {in_norm: none}}
      "last 25%": {ffn: {in_norm: {kind: layer, bias: true}, branch_scale: 0.5}}
  norm:                                                # spelled out
    scheme: custom
    final_norm: default
    overrides:
      ":": {attention: {in_norm: default, q_norm: default, k_norm: {scope: all_heads}},
            ffn: {in_norm: default, branch_scale: {value: 0.1, learned: vector}}}
```

`python -m megnorm schemes NAME --layers L [KEY=VALUE]` prints the equations of one."""


def scheme_list() -> list[str]:
    """A line for each scheme: name, what it is, source."""
    width = max(map(len, SCHEMES))
    return [
        f"{name:<{width}}  {scheme.summary} [{scheme.paper}]{_also(scheme)}"
        for name, scheme in SCHEMES.items()
    ]


def about_scheme(name: str) -> list[str]:
    """What to know of one scheme: source, initial values, needs, options with their defaults."""
    scheme = find_scheme(name)
    lines = [
        f"{ALIASES.get(name, name)}: {scheme.summary}{_also(scheme)}",
        f"source: {scheme.paper}",
        f"initial values: {_init(scheme)}",
    ]
    lines += [f"needs: {scheme.needs}"] if scheme.needs else []
    lines += [f"options: {_options(scheme)}"] if scheme.options.model_fields else []
    return [*lines, ""]


def markdown_page() -> list[str]:
    """The lines of configs/norms/README.md."""
    lines = [*INTRO.splitlines(), "", "## All schemes", ""]
    lines += _grid(
        [
            ["scheme", "what it is", "source", "initial values", "needs", "options"],
            *(
                [
                    f"`{name}`{_also(scheme)}",
                    scheme.summary,
                    scheme.paper,
                    _init(scheme),
                    scheme.needs,
                    _options(scheme),
                ]
                for name, scheme in SCHEMES.items()
            ),
        ]
    )
    lines += ["", "## Slots", "", f"At depth {DEPTH} and width {WIDTH}.", "", *KEY, ""]
    lines += _grid(table_rows())
    lines += ["", "## Equations", "", f"Of 4 layers of width {WIDTH}."]
    for name in SCHEMES:
        lines += ["", f"### {name}", "", "```", *equations(resolve(NormConfig(scheme=name), 4, WIDTH)), "```"]
    return lines


def _init(scheme: Scheme) -> str:
    return scheme.spec(scheme.options()).init


def _also(scheme: Scheme) -> str:
    return f" (also {', '.join(scheme.aliases)})" if scheme.aliases else ""


def _options(scheme: Scheme) -> str:
    return ", ".join(f"{name}={_shown(field.default)}" for name, field in scheme.options.model_fields.items())


def _shown(value: object) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, dict)
        else "{}"
    )


def _grid(rows: list[list[str]]) -> list[str]:
    head, *body = [["" if cell == "." else cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
