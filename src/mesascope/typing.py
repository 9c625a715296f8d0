"""Axis glossary and array aliases.

Axis names used in annotations, fixed once:

| name    | meaning                                              |
|---------|------------------------------------------------------|
| `seed`  | independently trained copies of one model            |
| `batch` | independent sequences (or sequences × heads, flat)   |
| `time`  | position in a sequence                               |
| `model` | width of the residual stream                         |
| `head`  | attention heads                                      |
| `key`   | width of queries and keys                            |
| `value` | width of values                                      |
| `state` | width of a generator's hidden state                  |
| `obs`   | width of an observation                              |
| `stack` | several observations as one vector                   |
| `code`  | width of an encoding of such a vector                |
| `layer` | depth                                                |
| `vocabulary` | tokens there are                                |
| `document`, `shard` | documents of a corpus, files of tokens   |
"""

from jaxtyping import Array, Bool, Float, Int

__all__ = ["Array", "Bool", "Float", "Int"]
