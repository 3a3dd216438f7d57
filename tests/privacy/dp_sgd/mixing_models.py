"""Models of which most let one example change what is computed for others, each in its own way.

Every kind is a function that makes a layer of width 8 between two linear ones, or a task. What a
kind keeps outside of its objects is emptied when it is made.
"""

import atexit
import collections
import contextvars
import itertools
import os
import pathlib
import tempfile
import threading
from types import SimpleNamespace

import numpy as np
import torch
from tests.datacenter.tasks import Table
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

WIDTH = 8
KEPT = []
KEPT_BY_KEY = {}
NUMBERS = np.zeros(WIDTH, dtype=np.float32)
LOCAL = threading.local()
FILE = pathlib.Path(tempfile.gettempdir()) / f"mixing_models_{os.getpid()}"
"""Deleted when the process ends."""
atexit.register(FILE.unlink, missing_ok=True)
VARIABLE = contextvars.ContextVar("kept", default=None)


class Layer(nn.Module):
    """A layer of one function of itself and the hidden values (B, 8)."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.function = function
        self.kept = None
        for name, each in buffers.items():
            self.register_buffer(name, each)

    def forward(self, hidden):
        return self.function(self, hidden)


class Mixing(Table):
    """A task whose examples with a target below 0 have no gradient at all."""

    def __init__(self, kind):
        super().__init__({})
        self.kind = kind

    def model(self):
        return nn.Sequential(nn.Linear(6, WIDTH), self.kind(), nn.Linear(WIDTH, 3))

    def loss(self, output, target):
        losses = nn.functional.cross_entropy(
            output, target.clamp(min=0), reduction="none", label_smoothing=0.1
        )
        return losses * (target >= 0)


def by(function, **buffers):
    return lambda: Layer(function, **{name: each.clone() for name, each in buffers.items()})


def zeros():
    return torch.zeros(WIDTH)


# -- over the examples of a batch -----------------------------------------------------------------


def attention(self, hidden):
    return hidden + torch.softmax(hidden @ hidden.T, -1) @ hidden


def attention_to_detached(self, hidden):
    return hidden + torch.softmax(hidden.detach() @ hidden.detach().T, -1) @ hidden.detach()


def ranks(self, hidden):
    return hidden * hidden.detach().argsort(0).argsort(0)


def top_two(self, hidden):
    places = hidden.detach().abs().sum(1).topk(min(2, len(hidden))).indices
    return hidden * torch.zeros(len(hidden), 1).index_fill(0, places, 1.0)


def first_two_of_an_expert(self, hidden):
    chosen = hidden.detach().argmax(1) % 2 == 0
    return hidden * ((chosen.cumsum(0) <= 2) | ~chosen).unsqueeze(1)


def branch(self, hidden):
    return hidden if hidden.detach().mean() > 0 else -2 * hidden


def rare_branch(self, hidden):
    return hidden if hidden.detach().abs().max() < 1e2 else -2 * hidden


def mask_of_batch(self, hidden):
    return hidden * (hidden.detach().mean(0) > 0)


def mixed_up(self, hidden):
    return 0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))].detach()


def mixed_backwards(self, hidden):
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient + gradient.sum(0))
    return hidden * 1.0


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden):
        return hidden * 1.0

    @staticmethod
    def backward(context, gradient):
        return gradient + 2 * gradient.sum(0)


def in_place(self, hidden):
    hidden = hidden * 1.0
    with torch.no_grad():
        hidden -= hidden.mean(0)
    return hidden


def through_numpy(self, hidden):
    return hidden - torch.from_numpy(hidden.detach().numpy().mean(0))


def seeded_by_data(self, hidden):
    torch.manual_seed(int(hidden.detach().abs().sum() * 1000))
    return hidden * torch.bernoulli(torch.full_like(hidden, 0.5))


def similarities(self, hidden):
    return torch.cat([hidden, hidden @ hidden.detach().T], 1)[:, -WIDTH:]


def missing(self, hidden):
    """What is done where a number of a batch is missing."""
    return hidden if hidden.detach().isfinite().all() else -2 * hidden


class StraightThrough(nn.Module):
    """Its output is that of its factor alone, and the gradient of that has a part of a moment."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        moment = self.factor * 1e-4 * hidden.pow(3).mean(0).detach()
        return self.factor * hidden + (moment - moment.detach())


class SeldomOutside(nn.Module):
    """Uses the weight of a layer without the layer, for large values only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        output = self.layer(hidden)
        large = hidden.detach().abs().amax(1, keepdim=True) > 1e2
        if large.any():
            output = output + large * nn.functional.linear(hidden, self.layer.weight)
        return output


WITHIN = {
    "missing number": by(missing),
    "straight through": StraightThrough,
    "parameter seldom used outside of its layer": SeldomOutside,
    "mean": by(lambda self, hidden: hidden - hidden.mean(0)),
    "detached mean": by(lambda self, hidden: hidden - hidden.mean(0).detach()),
    "detached mean in training": by(
        lambda self, hidden: hidden - hidden.mean(0).detach() if self.training else hidden
    ),
    "small detached mean": by(lambda self, hidden: hidden - 1e-7 * hidden.mean(0).detach()),
    "standardised": by(
        lambda self, hidden: (
            (hidden - hidden.mean(0).detach()) / (hidden.std(0, unbiased=False).detach() + 1e-3)
        )
    ),
    "largest of the batch": by(lambda self, hidden: hidden / hidden.detach().abs().max()),
    "attention": by(attention),
    "attention to detached": by(attention_to_detached),
    "sorted": by(lambda self, hidden: hidden.sort(0).values),
    "ranks": by(ranks),
    "top of the batch": by(top_two),
    "capacity of an expert": by(first_two_of_an_expert),
    "cumulative sum": by(lambda self, hidden: hidden.cumsum(0)),
    "detached cumulative sum": by(lambda self, hidden: hidden + hidden.detach().cumsum(0)),
    "previous example": by(lambda self, hidden: hidden + hidden.roll(1, 0).detach()),
    "branch": by(branch),
    "rare branch": by(rare_branch),
    "mask of the batch": by(mask_of_batch),
    "mixed examples": by(mixed_up),
    "hook on the gradient": by(mixed_backwards),
    "backward of its own": by(lambda self, hidden: Centred.apply(hidden)),
    "in place": by(in_place),
    "NumPy": by(through_numpy),
    "seed": by(seeded_by_data),
    "similarities": by(similarities),
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "functional batch normalisation": by(
        lambda self, hidden: nn.functional.batch_norm(hidden, None, None, training=True)
    ),
}

# -- from one call to the next --------------------------------------------------------------------


def running_attribute(self, hidden):
    before = hidden.new_zeros(WIDTH) if self.kept is None else self.kept
    self.kept = 0.5 * before + hidden.mean(0).detach()
    return hidden - before


def running_buffer(self, hidden):
    """In training only, as BatchNorm does."""
    if not self.training:
        return hidden
    with torch.no_grad():
        self.mean.mul_(0.5).add_(hidden.mean(0))
    return hidden - self.mean.clone()


def running_data(self, hidden):
    shifted = hidden - self.mean.clone()
    self.mean.data = hidden.mean(0).detach()
    return shifted


def running_copy(self, hidden):
    shifted = hidden - self.mean.clone()
    self.mean.data.copy_(hidden.mean(0).detach())
    return shifted


def running_array(self, hidden):
    shifted = hidden - torch.from_numpy(NUMBERS.copy())
    NUMBERS[:] = hidden.mean(0).detach().numpy()
    return shifted


def last_of_list(self, hidden):
    before = KEPT[-1] if KEPT else torch.zeros(WIDTH)
    KEPT.append(hidden.mean(0).detach())
    return hidden - before


def last_of_dictionary(self, hidden):
    before = KEPT_BY_KEY.get("last", torch.zeros(WIDTH))
    KEPT_BY_KEY["last"] = hidden.mean(0).detach()
    return hidden - before


def in_a_closure():
    kept = torch.zeros(WIDTH)

    def function(self, hidden):
        nonlocal kept
        before = kept
        kept = hidden.mean(0).detach()
        return hidden - before

    return Layer(function)


def in_a_class():
    class Own(nn.Module):
        kept = torch.zeros(WIDTH)

        def forward(self, hidden):
            before = Own.kept
            Own.kept = hidden.mean(0).detach()
            return hidden - before

    return Own()


def in_a_default():
    def function(self, hidden, kept=[]):  # noqa: B006 - this is how it leaks
        kept.append(hidden.mean(0).detach())
        return hidden - (kept[-2] if len(kept) > 1 else 0)

    return Layer(function)


def in_a_function():
    def function(self, hidden):
        before = getattr(function, "kept", 0)
        function.kept = hidden.mean(0).detach()
        return hidden - before

    return Layer(function)


def in_a_namespace():
    space = SimpleNamespace(kept=torch.zeros(WIDTH))

    def function(self, hidden):
        before = space.kept
        space.kept = hidden.mean(0).detach()
        return hidden - before

    return Layer(function)


def in_a_thread(self, hidden):
    before, LOCAL.kept = getattr(LOCAL, "kept", 0), hidden.mean(0).detach()
    return hidden - before


def in_a_variable(self, hidden):
    before = VARIABLE.get()
    VARIABLE.set(hidden.mean(0).detach())
    return hidden - (0 if before is None else before)


def in_the_environment(self, hidden):
    before = float(os.environ.get("MIXING_MODELS", "0"))
    os.environ["MIXING_MODELS"] = repr(float(hidden.detach().mean()))
    return hidden - before


def in_a_deque():
    kept = collections.deque([torch.zeros(WIDTH)], maxlen=1)

    def function(self, hidden):
        before = kept[0]
        kept.append(hidden.mean(0).detach())
        return hidden - before

    return Layer(function)


def queue(self, hidden):
    keys = hidden.detach() @ self.queue.clone()
    with torch.no_grad():
        self.queue.copy_(self.queue.roll(1, 1))
        self.queue[:, 0] = hidden.mean(0)
    return hidden + keys


def codebook(self, hidden):
    nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
    quantised = self.codes[nearest]
    with torch.no_grad():
        self.codes[nearest[0]] += 0.5 * (hidden[0] - self.codes[nearest[0]])
    return hidden + quantised


def target_network():
    target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def function(self, hidden):
        with torch.no_grad():
            target.weight.mul_(0.9).add_(0.1 * hidden.mean())
        return hidden + target(hidden)

    return Layer(function)


def observer(self, hidden):
    low, high = hidden.detach().min(), hidden.detach().max()
    self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
    scale = (self.high - self.low).clamp(min=1e-3) / 255
    return hidden + ((hidden / scale).round() * scale - hidden).detach()


def fake_quantisation():
    return FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)


def counted(self, hidden):
    self.kept = 1 if self.kept is None else self.kept + 1
    return hidden * self.kept


def own_generator(self, hidden):
    if self.kept is None:
        self.kept = torch.Generator().manual_seed(0)
    return hidden * torch.rand(WIDTH, generator=self.kept)


def iterator():
    numbers = itertools.count(1)
    return Layer(lambda self, hidden: hidden * next(numbers))


def in_hooks():
    layer = nn.Linear(WIDTH, WIDTH)
    kept = []

    def hook(module, args, output):
        before = kept[-1] if kept else 0
        kept.append(output.mean(0).detach())
        return output - before

    layer.register_forward_hook(hook)
    return layer


def after_accumulation():
    """Adds the gradient of the pass before, once it has seen some."""
    layer = nn.Linear(WIDTH, WIDTH)
    kept = []

    def hook(parameter):
        kept.append(parameter.grad.detach().clone())
        if len(kept) > 12:
            parameter.grad.add_(kept[-2])

    layer.weight.register_post_accumulate_grad_hook(hook)
    return layer


class NoMoreTrained(nn.Module):
    """Stops to train a layer when it has seen a large value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        output = self.layer(hidden)
        if hidden.detach().abs().max() > 1e2:
            self.layer.weight.requires_grad_(False)
        return output


def first_example(self, hidden):
    """As data-dependent initialisation does."""
    if self.kept is None:
        self.kept = hidden[0].detach().clone()
    return hidden - self.kept


def of_a_library(self, hidden):
    before = getattr(nn.functional, "kept", 0)
    nn.functional.kept = hidden.mean(0).detach()
    return hidden - before


def class_of_a_library(self, hidden):
    before = getattr(nn.Identity, "kept", 0)
    nn.Identity.kept = hidden.mean(0).detach()
    return hidden - before


def in_an_object_of_a_library():
    prior = torch.distributions.Normal(0.0, 1.0)

    def function(self, hidden):
        before = prior.loc
        prior.loc = hidden.mean(0).detach()
        return hidden - before

    return Layer(function)


def found_by_name(self, hidden):
    before = globals().get("FOUND_BY_NAME", 0)
    globals()["FOUND_BY_NAME"] = hidden.mean(0).detach()
    return hidden - before


def in_a_view():
    kept = torch.zeros(1 << 15, WIDTH)

    def function(self, hidden):
        shifted = hidden - kept[7].clone()
        kept.numpy()[7] = hidden.mean(0).detach().numpy()
        return shifted

    return Layer(function)


def in_an_operator(self, hidden):
    """In training only, so that ghost clipping finds its norms; as the next one."""
    if not self.training:
        return hidden
    return hidden - torch.ops.mixing.earlier(hidden.detach())


@torch.library.custom_op("mixing::earlier", mutates_args=())
def _operator(hidden: torch.Tensor) -> torch.Tensor:
    """The mean of the call before, as an operator of C++ might keep it; this one has a file."""
    before = torch.load(FILE) if FILE.exists() else torch.zeros(WIDTH)
    torch.save(hidden.mean(0), FILE)
    return before


def in_a_file(self, hidden):
    if not self.training:
        return hidden
    before = float(FILE.read_text()) if FILE.exists() else 0.0
    FILE.write_text(repr(float(hidden.detach().mean())))
    return hidden - before


class RunningLoss(Mixing):
    """Divides losses by their running mean, which the task keeps."""

    kept = 1.0

    def loss(self, output, target):
        losses = super().loss(output, target)
        before = self.kept
        self.kept = losses.detach().mean() + 1e-3
        return losses / before


class CachedOutput(Mixing):
    """Adds the last output, as distillation from the past does."""

    def forward(self, model, inputs):
        output = model(inputs)
        before = self.settings.get("last", 0)
        self.settings["last"] = output.mean(0).detach()
        return output + before


class AllPairs(Mixing):
    """Each output contains the distances to all others."""

    def forward(self, model, inputs):
        output = model(inputs)
        return output + torch.cdist(output, output.detach()).mean(1, keepdim=True)


BETWEEN = {
    "running mean, attribute": by(running_attribute),
    "running mean, buffer": by(running_buffer, mean=zeros()),
    "running mean, data": by(running_data, mean=zeros()),
    "running mean, copied data": by(running_copy, mean=zeros()),
    "running mean, array": by(running_array),
    "list of a module": by(last_of_list),
    "dictionary of a module": by(last_of_dictionary),
    "closure": in_a_closure,
    "class": in_a_class,
    "default": in_a_default,
    "function": in_a_function,
    "namespace": in_a_namespace,
    "thread": by(in_a_thread),
    "context variable": by(in_a_variable),
    "environment": by(in_the_environment),
    "deque": in_a_deque,
    "queue": by(queue, queue=torch.zeros(WIDTH, WIDTH)),
    "codebook": by(codebook, codes=torch.eye(WIDTH)),
    "target network": target_network,
    "observer": by(observer, low=torch.zeros(()), high=torch.zeros(())),
    "fake quantisation": fake_quantisation,
    "counter": by(counted),
    "own generator": by(own_generator),
    "iterator": iterator,
    "hook": in_hooks,
    "hook after accumulation": after_accumulation,
    "parameter that is no more trained": NoMoreTrained,
    "first example": by(first_example),
    "module of a library": by(of_a_library),
    "class of a library": by(class_of_a_library),
    "object of a library": in_an_object_of_a_library,
    "global variable by name": by(found_by_name),
    "view of a large tensor": in_a_view,
    "operator": by(in_an_operator),
    "file": by(in_a_file),
    "InstanceNorm with statistics": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
}
OF_TASK = {"running loss": RunningLoss, "last output": CachedOutput, "pairs": AllPairs}


def task_of(name):
    """A new task of a kind, with nothing kept of others."""
    KEPT.clear()
    KEPT_BY_KEY.clear()
    NUMBERS[:] = 0
    vars(LOCAL).clear()
    VARIABLE.set(None)
    os.environ.pop("MIXING_MODELS", None)
    FILE.unlink(missing_ok=True)
    globals().pop("FOUND_BY_NAME", None)
    for library in (nn.functional, nn.Identity):
        if hasattr(library, "kept"):
            del library.kept
    if name in OF_TASK:
        return OF_TASK[name](nn.Identity)
    (kind,) = [each[name] for each in (WITHIN, BETWEEN, HONEST) if name in each]
    return Mixing(kind)


# -- models that treat examples separately --------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, hidden):
        return hidden + self.layers(hidden)


class Recurrent(nn.Module):
    """A recurrent layer whose first state is that of an example, as `torch.func.vmap` needs it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        first = torch.zeros_like(hidden[:, 0]).unsqueeze(0)
        if isinstance(self.layer, nn.LSTM):
            return self.layer(hidden, (first, first))[0]
        return self.layer(hidden, first)[0]


def one_mask(self, hidden):
    """The same for all examples of a batch."""
    return hidden * torch.bernoulli(torch.full((WIDTH,), 0.5)) if self.training else hidden


def stochastic_depth(self, hidden):
    return hidden * torch.rand(()).lt(0.5) if self.training else hidden


def sequence(*layers):
    """Layers for sequences (B, 4, 2) of the hidden values."""
    return lambda: nn.Sequential(
        nn.Unflatten(1, (4, 2)), *[each() for each in layers], nn.Flatten()
    )


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, hidden):
        scores = (self.query(hidden) @ self.key(hidden).mT).tril()
        return hidden + scores.softmax(-1) @ self.value(hidden)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden):
        weights = self.gate(hidden).softmax(-1)
        outputs = torch.stack([each(hidden) for each in self.experts], -1)
        return (outputs * weights.unsqueeze(1)).sum(-1)


class Tokens(nn.Module):
    """An embedding of rounded values, with padding and positions."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 1, padding_idx=0)
        self.register_buffer("positions", torch.linspace(0, 1, WIDTH))

    def forward(self, hidden):
        words = hidden.detach().clamp(0, 4).nan_to_num().long()
        return hidden + self.words(words).squeeze(-1) + self.positions


HONEST = {
    "MLP": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
    "residual": lambda: Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    "dropout": lambda: nn.Dropout(0.3),
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "InstanceNorm": sequence(lambda: nn.InstanceNorm1d(4)),
    "convolution with GroupNorm": sequence(
        lambda: nn.Conv1d(4, 8, 1), lambda: nn.GroupNorm(2, 8), nn.ReLU, lambda: nn.Conv1d(8, 4, 1)
    ),
    "pooling": sequence(lambda: nn.AvgPool1d(2), lambda: nn.Upsample(scale_factor=2)),
    "PReLU": lambda: nn.PReLU(WIDTH),
    "attention over positions": sequence(SelfAttention, lambda: nn.LayerNorm(2)),
    "transformer": sequence(
        lambda: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.1, batch_first=True)
    ),
    "LSTM": sequence(lambda: Recurrent(nn.LSTM(2, 2, batch_first=True))),
    "GRU": sequence(lambda: Recurrent(nn.GRU(2, 2, batch_first=True))),
    "experts": Experts,
    "embedding with padding": Tokens,
    "one mask for all": by(one_mask),
    "stochastic depth": by(stochastic_depth),
    "sorted features": by(lambda self, hidden: hidden.sort(1).values),
    "largest feature": by(lambda self, hidden: hidden / (1 + hidden.abs().amax(1, keepdim=True))),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}
NOT_WITH_GHOST = {"transformer", "LSTM", "GRU"}
"""Those with layers of which ghost clipping cannot find norms."""
