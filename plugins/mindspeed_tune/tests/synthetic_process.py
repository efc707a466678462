"""A process whose ranks are synthetic: searches of it take no dry run, and every number is known."""

from concurrent.futures import Future
from dataclasses import replace

from synthetic_ranks import PARAMETERS, record

from mindspeed_tune.layout import Layout

_SIZES = {
    "cp": "--context-parallel-size",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
}


class SyntheticProcess:
    """Answers every job at once.

    Args:
        dying: pipeline size whose ranks die; 0 for none.
        per_layer: parameters of a layer.
        embedded: of the embedding, and of the head.
    """

    platform, parallel = "fake", 2

    def __init__(self, dying=0, per_layer=1_000_000, embedded=400_000):
        self.dying, self.per_layer, self.embedded = dying, per_layer, embedded
        self.jobs = []

    def begin(self):
        """Nothing has to be imported."""

    def submit(self, job):
        self.jobs.append(job)
        future = Future()
        future.set_result(self._outcome(job))
        return future

    def _outcome(self, job):
        given = dict(zip(job["command"]["arguments"], job["command"]["arguments"][1:]))
        sizes = {name: int(given.get(flag, 1)) for name, flag in _SIZES.items()}
        if sizes["pp"] == self.dying:
            return {"kind": "failed", "text": "its process ended with status -9", "rank": job["rank"]}
        layers = int(given["--num-layers"])
        chunk = int(given.get("--num-layers-per-virtual-pipeline-stage", layers // sizes["pp"]))
        layout = Layout(job["world_size"], **sizes, vpp=layers // sizes["pp"] // chunk)
        microbatches = int(given["--global-batch-size"]) // layout.dp
        found = record(
            layout,
            job["rank"],
            microbatches,
            runs=((2 * layout.pp, 0), (layout.pp, 0)) if layout.vpp > 1 else ((2, 1), (1, 1), (1, 2)),
            layers=[layers // layout.pp] * layout.pp,
        )
        overlaps = {
            name: f"--{name.replace('_', '-')}" in job["command"]["arguments"]
            for name in ("overlap_grad_reduce", "overlap_param_gather")
        }
        found = replace(found, flags={**found.flags, **overlaps})
        place = layout.place(job["rank"])["pp"]
        ends = (place == 0) + (place == layout.pp - 1)
        parameters = (layers // layout.pp * self.per_layer + ends * self.embedded) // layout.tp
        return {"kind": "record", "record": scaled(found, parameters).as_json()}


def scaled(found, parameters):
    """Return a record of another number of parameters on the rank."""
    shards = found.layout.optimizer_shards
    held = {
        "parameters": 2.0 * parameters,
        "gradients": 4.0 * parameters,
        "main parameters": 4.0 * parameters / shards,
        "optimizer state": 8.0 * parameters / shards,
    }

    def categories(given):
        return {name: held.get(name, size) for name, size in given.items()}

    def calls(given):
        grown = parameters / PARAMETERS
        return tuple(replace(c, bytes=round(c.bytes * grown)) if c.group == 0 else c for c in given)

    runs = tuple(
        replace(
            run, peak=replace(run.peak, categories=categories(run.peak.categories)), calls=calls(run.calls)
        )
        for run in found.runs
    )
    update = replace(
        found.update,
        peak=replace(found.update.peak, categories=categories(found.update.peak.categories)),
        after=categories(found.update.after),
        calls=calls(found.update.calls),
    )
    sizes = {**found.sizes, "dense_elements": parameters}
    flags = {**found.flags, "untie_embeddings_and_output_weights": True}
    return replace(found, flags=flags, static=categories(found.static), runs=runs, update=update, sizes=sizes)
