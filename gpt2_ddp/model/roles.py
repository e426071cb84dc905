"""The roles of a model's parameters, from which optimizers make their groups."""

from typing import Any, Literal, get_args

from torch import nn

Role = Literal["matrix", "embedding", "head", "vector", "other"]
"""matrix: a hidden layer's, or a stack of them [..., A, B]: Muon's. embedding: a table that no matrix product reads.
head: the matrix that makes the outputs. vector: without weight decay."""
KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def roles(model: Any) -> dict[Any, Role]:
    """The role of each parameter, in the order of `named_parameters`.

    A model's optional method `parameter_roles` returns roles by parameter. The others follow from modules and shapes.
    The head is transformers' `get_output_embeddings`, or else the last `nn.Linear`. An `nn.Embedding` that shares its
    weight with the head is the head.
    """
    own: dict[Any, Role] = model.parameter_roles() if hasattr(model, "parameter_roles") else {}
    assert {*own.values()} <= {*get_args(Role)}, own.values()
    found: dict[Any, Role] = {
        parameter: "vector" if parameter.dim() < 2 or name.endswith("bias") else "matrix"
        for name, parameter in model.named_parameters()
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            found[module.weight] = "embedding"
        elif isinstance(module, KERNELS):
            found[module.weight] = "other"
        elif isinstance(module, nn.Linear) and not hasattr(model, "get_output_embeddings"):
            head = module
    if head is not None and "head" not in own.values():
        found[head.weight] = "head"
    return found | own
