"""Of Dynamo, which traces Python for torch.compile."""

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import TorchDynamoException

config = torch._dynamo.config
functorch_config = torch._functorch.config
list_backends = torch._dynamo.list_backends
register_backend = torch._dynamo.register_backend
reset = torch._dynamo.reset

__all__ = ["TorchDynamoException", "aot_eager", "config", "functorch_config", "list_backends", "register_backend", "reset"]
