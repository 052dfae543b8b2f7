"""The help of the command line: verbs in groups, and an example below the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click

GROUPS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Capture": {
            "profile": "nvprof-kit profile --schedule 10:13 -o run -- python train.py",
            "session launch": "nvprof-kit session launch -- python serve.py",
            "session start": "nvprof-kit session start -o first",
            "session stop": "nvprof-kit session stop",
            "session status": "nvprof-kit session status",
            "record": "nvprof-kit record -o run.json.gz -- python train.py",
            "doctor": "nvprof-kit doctor run.sqlite",
            "scrub": "nvprof-kit scrub run.sqlite -o public.sqlite",
            "recipes": 'ls "$(nvprof-kit recipes)"',
        },
        "Read": {
            "layers": "nvprof-kit layers run.sqlite --depth 3 -o layers.csv",
            "breakdown": "nvprof-kit breakdown run.sqlite --view idle",
            "summary": "nvprof-kit summary run.sqlite --view kernel --top 20",
            "advise": "nvprof-kit advise run.sqlite",
            "diff": "nvprof-kit diff before.sqlite after.sqlite --fail-on step:+5%",
            "flops": "nvprof-kit flops run.sqlite --counts run.flops.json",
            "memory": "nvprof-kit memory snapshot.pickle --by layer",
            "metrics": "nvprof-kit metrics run.sqlite --depth 3",
            "timers": "nvprof-kit timers time_log/",
        },
        "Nsight Compute": {
            "ncu plan": "nvprof-kit ncu plan run.sqlite --share 0.8 --script plan.sh",
            "ncu profile": "nvprof-kit ncu profile --layer model.layers.3.mlp -o mlp -- python train.py",
            "ncu layers": "nvprof-kit ncu layers plan.csv --capture run.sqlite",
            "ncu kernels": "nvprof-kit ncu kernels plan.csv -o kernels.csv",
        },
        "Job of several ranks": {
            "ranks compare": "nvprof-kit ranks run-rank*.sqlite",
            "ranks map": "nvprof-kit ranks map -o maps/ captures/",
            "ranks profile": (
                "torchrun --nproc-per-node 8 --no-python nvprof-kit ranks profile --ranks 0,7 -- python train.py"
            ),
        },
        "Out": {
            "report": "nvprof-kit report run.sqlite -o run.html",
            "plot": "nvprof-kit plot run.sqlite --view timeline -o step.svg",
            "export": "nvprof-kit export run.sqlite --step 12 -o step.json.gz",
            "skill": 'cat "$(nvprof-kit skill)"',
        },
    }
)
"""The verbs by group, each with an example."""


class VerbGroups(click.Group):
    """The verbs of the command line, listed by `GROUPS`."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a verb, with its examples below its options."""
        super().add_command(cmd, name)
        examples = {verb: example for verbs in GROUPS.values() for verb, example in verbs.items()}
        of_verb = {"": cmd} | (dict(cmd.commands) if isinstance(cmd, click.Group) else {})
        for inner, command in of_verb.items():
            if example := examples.get(f"{cmd.name} {inner}".strip()):
                command.epilog = f"\b\nExample:\n  {example}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group."""
        width = max(map(len, self.commands))
        for title, verbs in GROUPS.items():
            names = dict.fromkeys(verb.split()[0] for verb in verbs)
            rows = [(f"{name:{width}}", self.commands[name].get_short_help_str(200)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)
