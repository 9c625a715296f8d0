"""What rounding makes of contracting systems: losses of released models on 4096 sequences, and a digest of these.

    python scripts/measure_rounding.py
    XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 python scripts/measure_rounding.py  # no fused multiplication and addition

The digest, and losses to six digits, are to be the same on every machine.
"""

import hashlib

import jax
import numpy as np

from mesascope import released
from mesascope.analysis.scores import in_context_score
from mesascope.experiments.common import EVALUATION

SEQUENCES, BATCH = 4096, 256


def main() -> None:
    key = jax.random.key(EVALUATION)
    for layers in (1, 6):
        models, config = released.read_model(released.weights_path(f"contracting-linear-{layers}"))
        found = in_context_score(models, config.examples, sequences=SEQUENCES, batch_size=BATCH, key=key)
        print(f"contracting-linear-{layers}: {found.loss.values.mean():.8f}")
    digest = hashlib.sha256()
    for i in range(SEQUENCES // BATCH):
        drawn = config.task.sample(jax.random.fold_in(key, i), BATCH)
        digest.update(np.asarray(drawn.observations).tobytes())
    print(f"sequences: {digest.hexdigest()[:16]}, {jax.devices()[0].device_kind}, jax {jax.__version__}")


if __name__ == "__main__":
    main()
