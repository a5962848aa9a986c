"""A batch of tensors on its way through an engine's weight loader."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from rl_core.errors import ManifestMismatchError
from rl_core.metadata import nearest
from rl_core.rollout.bucket_receiver import Arrival


class Named:
    """Tensors by name, remembering which one is being loaded: the engines' loaders do not say."""

    def __init__(self, batch: Sequence[tuple[str, Tensor]]) -> None:
        self._batch = batch
        self._current = ""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._batch:
            self._current = name
            yield name, tensor

    def refusal(self, error: Exception, parameters: Iterable[str]) -> ManifestMismatchError:
        """What the loader's error means, with the tensor and the parameter nearest to it.

        Args:
            error: what the loader raised.
            parameters: names of the model's parameters.
        """
        shape = next((tuple(item.shape) for name, item in self._batch if name == self._current), ())
        near = nearest(self._current, list(parameters))
        return ManifestMismatchError(
            f"the engine's model refuses tensor {self._current!r} of shape {shape} "
            f"({type(error).__name__}: {error}); the nearest parameter is {near!r}"
        )


def owned(arrival: Arrival) -> Tensor:
    """The tensor in memory of its own, which tells it from the others while it is loaded."""
    tensor = arrival.tensor
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.clone() if arrival.lent or not alone else tensor
