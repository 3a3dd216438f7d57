"""What recomputed blocks collect outside of arguments and attributes is there once, or refused."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import queue
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tests.core.task import collected_losses
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from isthmus.errors import TaskError
from isthmus.task.scoring.named_values import named_by
from isthmus.task.scoring.recomputation import recompute

LOSSES: Any = []
TOTAL: Any = 0.0
TABLE: dict[str, Any] = {"nested": [], "total": 0.0}
VARIABLE: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("VARIABLE")
LOCAL = threading.local()
SPACE = types.SimpleNamespace(losses=[])
ODD: Any = None
BOUND: list[torch.Tensor] = []
SCALES: list[float] = []
COUNT = torch.zeros(1)
TABLES = torch.zeros(3, 1 << 21)
NORM = nn.BatchNorm1d(16)


class Shared:
    """Losses of a class."""

    losses: ClassVar[collections.deque[torch.Tensor]] = collections.deque()
    total: ClassVar[Any] = 0.0

    @classmethod
    def add(cls, loss: torch.Tensor) -> None:
        """Collect one in both ways."""
        cls.losses.append(loss)
        cls.total = cls.total + loss

    @classmethod
    def take(cls) -> Any:
        """The losses so far, and begin anew."""
        total = sum(cls.losses) + cls.total
        cls.losses.clear()
        cls.total = 0.0
        return total


@dataclasses.dataclass(slots=True)
class Slotted:
    """Losses of an object without a dictionary."""

    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Store:
    """Losses of an object."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.total: Any = 0.0

    def add(self, loss: torch.Tensor) -> None:
        """Collect one in both ways."""
        self.losses = [*self.losses, loss]
        self.total = self.total + loss

    def take(self) -> Any:
        """The losses so far, and begin anew."""
        total = sum(self.losses) + self.total
        self.losses = []
        self.total = 0.0
        return total

    @property
    def current(self) -> list[torch.Tensor]:
        """A list that is found when it is needed."""
        return SPACE.losses  # type: ignore[no-any-return]


SLOTTED = Slotted()
STORE = Store()


def emptied(losses: Any) -> Any:
    total = sum(losses)
    losses.clear()
    return total


def to_list(loss: torch.Tensor) -> None:
    LOSSES.append(loss)


def to_new_list(loss: torch.Tensor) -> None:
    global LOSSES
    LOSSES = [*LOSSES, loss]


def from_new_list() -> Any:
    global LOSSES
    total = sum(LOSSES)
    LOSSES = []
    return total


def to_sum(loss: torch.Tensor) -> None:
    global TOTAL
    TOTAL = TOTAL + loss


def from_sum() -> Any:
    global TOTAL
    total = TOTAL
    TOTAL = 0.0
    return total


def to_tables(loss: torch.Tensor) -> None:
    TABLE["nested"].append(loss)
    TABLE["total"] = TABLE["total"] + loss


def from_tables() -> Any:
    total = TABLE["total"] + emptied(TABLE["nested"])
    TABLE["total"] = 0.0
    return total


def to_variable(loss: torch.Tensor) -> None:
    VARIABLE.get().append(loss)


def to_thread(loss: torch.Tensor) -> None:
    LOCAL.losses.append(loss)


def to_default(loss: torch.Tensor, losses: list[torch.Tensor] = []) -> None:  # noqa: B006
    losses.append(loss)


def to_function(loss: torch.Tensor) -> None:
    to_function.losses.append(loss)  # type: ignore[attr-defined]


to_function.losses = []  # type: ignore[attr-defined]


def to_file(loss: torch.Tensor) -> None:
    collected_losses.COLLECTED.append(loss)


def to_imported_list(loss: torch.Tensor) -> None:
    from tests.core.task.collected_losses import COLLECTED

    COLLECTED.append(loss)


def to_named_list(loss: torch.Tensor) -> None:
    globals()["LOSSES"].append(loss)


def of_file() -> Any:
    return emptied(collected_losses.COLLECTED)


@functools.cache
def found_once() -> list[torch.Tensor]:
    return LOSSES  # type: ignore[no-any-return]


@torch.no_grad()
def to_decorated(loss: torch.Tensor) -> None:
    LOSSES.append(loss)


def to_comprehension(loss: torch.Tensor) -> None:
    [LOSSES.append(each) for each in (loss, 2 * loss)]


def counted() -> tuple[Callable[[torch.Tensor], None], Callable[[], Any]]:
    """A function that collects in variables of the one around it, and one that takes them."""
    losses: list[torch.Tensor] = []
    total: Any = 0.0

    def add(loss: torch.Tensor) -> None:
        nonlocal total
        losses.append(loss)
        total = total + loss

    def take() -> Any:
        nonlocal total
        result = total + emptied(losses)
        total = 0.0
        return result

    return add, take


def of_losses() -> Any:
    return emptied(LOSSES)


PLACES: dict[str, tuple[Callable[[torch.Tensor], None], Callable[[], Any]]] = {
    "list of a file": (to_list, of_losses),
    "new list of a file": (to_new_list, from_new_list),
    "number of a file": (to_sum, from_sum),
    "table of a file": (to_tables, from_tables),
    "closure": counted(),
    "class": (Shared.add, Shared.take),
    "object": (STORE.add, STORE.take),
    "property": (lambda loss: STORE.current.append(loss), lambda: emptied(SPACE.losses)),
    "slots": (lambda loss: SLOTTED.losses.append(loss), lambda: emptied(SLOTTED.losses)),
    "namespace": (lambda loss: SPACE.losses.append(loss), lambda: emptied(SPACE.losses)),
    "context": (to_variable, lambda: emptied(VARIABLE.get())),
    "thread": (to_thread, lambda: emptied(LOCAL.losses)),
    "default": (to_default, lambda: emptied((to_default.__defaults__ or ())[0])),
    "function": (to_function, lambda: emptied(to_function.losses)),  # type: ignore[attr-defined]
    "imported file": (to_file, of_file),
    "list by its name": (to_named_list, of_losses),
    "imported list": (to_imported_list, of_file),
    "method of a list": (BOUND.append, lambda: emptied(BOUND)),
    "partial": (functools.partial(list.append, BOUND), lambda: emptied(BOUND)),
    "cached": (lambda loss: found_once().append(loss), of_losses),
    "decorated": (to_decorated, of_losses),
    "nested code": (to_comprehension, of_losses),
}


class Block(nn.Module):
    """Collects a loss in a hook of its layer."""

    def __init__(self, collect: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.layer.register_forward_hook(lambda *call: void(collect(call[-1].square().mean())))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs).tanh()
        return output


def void(_: object) -> None:
    """What a hook returns so that an output stays as it is."""


def trained(blocks: nn.Module, take: Callable[[], Any], **recomputed: Any) -> list[Any]:
    """Losses and gradients of three steps, of which each takes what blocks have collected.

    It takes them before the backward pass, after which nothing may be left.
    """
    if recomputed:
        for block in blocks.children():
            recompute(block, **recomputed)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        blocks.zero_grad()
        hidden = torch.randn(12, 16)
        for block in blocks.children():
            hidden = block(hidden)
        collected = torch.as_tensor(take())
        (hidden.sum() + collected).backward()
        found += [collected.detach(), *(each.grad for each in blocks.parameters())]
    return found


def blocks_of(kind: Callable[..., nn.Module], *given: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([kind(*given), nn.Sequential(kind(*given))])


DEFAULT: list[torch.Tensor] = []
WITH_DEFAULT: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar(
    "WITH_DEFAULT", default=DEFAULT
)
PLACES["context's default"] = (
    lambda loss: WITH_DEFAULT.get().append(loss),
    lambda: emptied(DEFAULT),
)


class Called:
    """Is a function, and collects in itself and in a list of the file."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def __call__(self, *call: Any) -> None:
        loss = call[-1].square().mean()
        self.losses.append(loss)
        LOSSES.append(loss)

    def take(self) -> Any:
        """The losses so far, and begin anew."""
        return emptied(self.losses) + emptied(LOSSES)


def test_losses_of_an_object_that_is_a_hook_are_there_once() -> None:
    called = Called()

    def hooked() -> nn.Module:
        blocks = blocks_of(Plain)
        for block in (blocks[0], blocks[1][0]):  # type: ignore[index]
            block.register_forward_hook(called)
        return blocks

    expected = trained(hooked(), called.take)
    found = trained(hooked(), called.take, compares=True)
    assert expected[0] > 0
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_losses_that_blocks_collect_elsewhere_are_there_once(
    place: str, keep_products: bool
) -> None:
    collect, take = PLACES[place]
    VARIABLE.set([])
    LOCAL.losses = []
    expected = trained(blocks_of(Block, collect), take)
    settings = {"compares": True, "keep_products": keep_products}
    found = trained(blocks_of(Block, collect), take, **settings)
    assert expected[0] > 0
    assert all(map(torch.equal, expected, found))
    assert take() == 0


def test_losses_that_hooks_of_all_modules_collect_are_there_once() -> None:
    def collect(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear):
            LOSSES.append(output.square().mean())

    with register_module_forward_hook(collect):
        expected = trained(blocks_of(Plain), of_losses)
        found = trained(blocks_of(Plain), of_losses, compares=True)
    assert expected[0] > 0
    assert all(map(torch.equal, expected, found))
    assert of_losses() == 0


class Plain(nn.Module):
    """Collects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs).tanh()
        return output


class Naming(Plain):
    """Collects in a list that its `forward` names, or in its root's."""

    def forward(self, inputs: torch.Tensor, losses: Any = None) -> torch.Tensor:
        hidden = self.layer(inputs)
        self.collect(hidden.square().mean(), losses)
        output: torch.Tensor = hidden.tanh()
        return output

    def collect(self, loss: torch.Tensor, losses: Any) -> None:
        LOSSES.append(loss)


class Rooted(Naming):
    """Collects in an attribute of the model that it is a part of."""

    root: weakref.ReferenceType[Any]

    def collect(self, loss: torch.Tensor, losses: Any) -> None:
        self.root().losses.append(loss)


class Given(Naming):
    """Collects in what it is called with."""

    def collect(self, loss: torch.Tensor, losses: Any) -> None:
        losses.append(loss)


class Model(nn.Module):
    """Calls blocks, and returns the sum of their losses, too, of which it keeps nothing."""

    def __init__(self, kind: type[Naming]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind(), kind()])
        self.losses: list[torch.Tensor] = []
        for block in self.blocks:
            block.root = weakref.ref(self)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            inputs = block(inputs, self.losses)
        return inputs, torch.as_tensor(emptied(self.losses) + emptied(LOSSES))


@pytest.mark.parametrize("kind", [Naming, Rooted, Given])
def test_nothing_is_left_of_the_backward_pass_where_losses_are_taken_in_the_forward_one(
    kind: type[Naming],
) -> None:
    """Else the next step would have it."""
    plain, again = Model(kind), Model(kind)
    for block in again.blocks:
        recompute(block, compares=True)
    for step in range(3):
        found = []
        for model in (plain, again):
            model.zero_grad()
            output, collected = model(torch.full((12, 16), 1.0 + step))
            (output.sum() + collected).backward()
            found.append([collected, *(each.grad for each in model.parameters())])
        assert found[0][0] > 0
        assert all(map(torch.equal, *found))
    assert again.losses == LOSSES == []


class Heir(Naming):
    """Calls the method of its class's own."""

    def forward(self, inputs: torch.Tensor, losses: Any = None) -> torch.Tensor:
        return super().forward(inputs, losses) * 1.0


class Projecting(Plain):
    """Has a method that others call."""

    def projected(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(inputs)
        LOSSES.append(hidden.square().mean())
        return hidden


class CallingChild(nn.Module):
    """Calls another method of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Projecting()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.child.projected(inputs).tanh()
        return output


class CallingAttributes(Plain):
    """Calls a function and an object that it has in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.collect = to_list
        self.router = Router()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(inputs)
        self.collect(hidden.square().mean())
        self.router.route(hidden)
        output: torch.Tensor = hidden.tanh()
        return output


class Router:
    """Is no module."""

    def route(self, hidden: torch.Tensor) -> None:
        """Collect a loss."""
        LOSSES.append(hidden.abs().mean())


class Patched(Plain):
    """Has another `forward` than its class."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other  # type: ignore[method-assign]

    def other(self, inputs: torch.Tensor) -> torch.Tensor:
        """Collect a loss."""
        hidden: torch.Tensor = self.layer(inputs)
        LOSSES.append(hidden.square().mean())
        return hidden.tanh()


@pytest.mark.parametrize("kind", [Heir, CallingChild, CallingAttributes, Patched])
def test_losses_of_methods_that_a_block_reaches_are_there_once(kind: type[nn.Module]) -> None:
    expected = trained(blocks_of(kind), of_losses)
    found = trained(blocks_of(kind), of_losses, compares=True)
    assert expected[0] > 0
    assert all(map(torch.equal, expected, found))
    assert of_losses() == 0


class Anything:
    """Has all attributes, as the tables of some packages."""

    def __getattr__(self, name: str) -> Any:
        return Anything()


class Unbound:
    """Has no class yet, as the proxies of some packages."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("it is not there yet")


class Unhashed(type):
    """A class of classes without a hash."""

    __hash__ = None  # type: ignore[assignment]


class Loading(dict[str, Any]):
    """Must not be read."""

    def __iter__(self) -> Any:
        raise RuntimeError("it would load everything")

    def keys(self) -> Any:
        """Load it."""
        raise RuntimeError("it would load everything")

    def values(self) -> Any:
        """Load it."""
        raise RuntimeError("it would load everything")


class Referred:
    """Is gone."""


def itself() -> Any:
    found = types.SimpleNamespace()
    found.__wrapped__ = found
    return found


ODD_VALUES: dict[str, Callable[[], Any]] = {
    "anything": Anything,
    "no class": Unbound,
    "no hash": lambda: Unhashed("Named", (), {})(),
    "class without hash": lambda: Unhashed("Named", (), {}),
    "loading": lambda: Loading(a=1),
    "gone": lambda: weakref.proxy(Referred()),
    "wraps itself": itself,
}


class NamingOdd(Plain):
    """Names a variable of the file."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert ODD is not None
        return super().forward(inputs)


@pytest.mark.parametrize("kind", ODD_VALUES)
def test_odd_objects_are_not_asked_for_anything(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ODD_VALUES[kind]()
    for named in (odd, types.SimpleNamespace(inner=odd), Store.__new__(Store)):
        vars(named).update(inner=odd) if type(named) is Store else None
        monkeypatch.setitem(globals(), "ODD", named)
        block = NamingOdd()
        block.layer.register_forward_hook(lambda *_: void(odd))
        recompute(block, compares=True)
        block(torch.randn(12, 16)).sum().backward()


def test_functions_that_call_one_another_a_thousand_times_are_followed() -> None:
    table: dict[str, Any] = {"losses": LOSSES, "last": to_list}
    lines = [f"def call_{n}(loss): call_{n + 1}(loss)" for n in range(400)]
    exec("\n".join([*lines, "def call_400(loss): last(loss)"]), table)
    expected = trained(blocks_of(Block, table["call_0"]), of_losses)
    found = trained(blocks_of(Block, table["call_0"]), of_losses, compares=True)
    assert all(map(torch.equal, expected, found))


class Journal:
    """Has a thread of its own that takes what it is given."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[float] = queue.Queue()
        self.written: list[float] = []
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Write each number."""
        while (number := self.waiting.get()) >= 0:
            self.written.append(number)
            self.waiting.task_done()

    def add(self, loss: torch.Tensor) -> None:
        """Have it written."""
        self.waiting.put(float(loss.detach()))


def test_what_another_thread_waits_for_is_left_alone() -> None:
    """It would lose its turn, and what it has taken would be there again."""
    journal = Journal()
    trained(blocks_of(Block, journal.add), lambda: 0.0, compares=True)
    journal.waiting.join()
    assert journal.thread.is_alive()
    assert len(journal.written) == 2 * (3 + 2 + 2)  # with the repetition of the first call
    journal.waiting.put(-1.0)
    journal.thread.join()


def test_what_a_block_adds_to_arguments_is_there_once_whatever_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "ODD", {number: [number] for number in range(150_000)})

    class Adding(NamingOdd):
        def forward(self, inputs: torch.Tensor, given: Any = None) -> torch.Tensor:
            given["inner"]["losses"].append(inputs.sum())
            return super().forward(inputs)

    block = Adding()
    recompute(block, compares=True)
    given: Any = {"inner": {"losses": []}}
    block(torch.randn(12, 16), given).sum().backward()
    assert len(given["inner"]["losses"]) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_blocks_with_scripted_modules_are_recomputed() -> None:
    def scripted() -> nn.Module:
        return nn.Sequential(Plain(), torch.jit.script(nn.Tanh()))

    expected = trained(blocks_of(scripted), lambda: 0.0)
    found = trained(blocks_of(scripted), lambda: 0.0, compares=True)
    assert all(map(torch.equal, expected, found))


def test_losses_of_blocks_within_others_are_there_once() -> None:
    """The inner ones are called again for their own backward pass, and are not compared."""

    def within(recomputed: bool) -> list[Any]:
        blocks = blocks_of(Naming)
        if recomputed:
            recompute(blocks[1][0], compares=True)  # type: ignore[index]
        settings = {"compares": True} if recomputed else {}
        return trained(blocks, of_losses, **settings)

    assert all(map(torch.equal, within(False), within(True)))
    assert of_losses() == 0


def add_in_place(loss: torch.Tensor) -> None:
    COUNT.add_(1)


def add_to_large(loss: torch.Tensor) -> None:
    TABLES[0, 0] += 1


def norm_elsewhere(loss: torch.Tensor) -> None:
    NORM(torch.randn(4, 16))


class Scaled(Plain):
    """Returns something else with each call, by a list of the file."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        SCALES.append(1.0)
        return super().forward(inputs) / len(SCALES)


@pytest.mark.parametrize("change", [add_in_place, add_to_large, norm_elsewhere])
def test_a_block_that_changes_a_tensor_elsewhere_is_refused(
    change: Callable[[torch.Tensor], None],
) -> None:
    block = Block(change)
    recompute(block, compares=True)
    with pytest.raises(TaskError, match=r"a Block computes something else .* outside of it"):
        block(torch.randn(12, 16))


def test_an_output_that_depends_on_what_was_collected_is_that_without_recomputation() -> None:
    found = []
    for settings in ({}, {"compares": True}):
        SCALES.clear()
        found.append(trained(blocks_of(Scaled), lambda: 0.0, **settings))
    assert all(map(torch.equal, *found))


def test_what_an_installed_package_keeps_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have threads, which would lose what they were given, as those of a journal."""
    journal: Any = types.ModuleType("journal_of_steps")
    journal.__path__ = [f"{sysconfig.get_path('purelib')}/journal_of_steps"]
    journal.lines = []
    exec("def write(line):\n    lines.append(line)\n", vars(journal))
    monkeypatch.setitem(sys.modules, "journal_of_steps", journal)
    monkeypatch.setitem(globals(), "JOURNAL", journal)
    block = Block(lambda loss: JOURNAL.write("a call"))  # type: ignore[name-defined]  # noqa: F821
    recompute(block, compares=True)
    block(torch.randn(12, 16)).sum().backward()
    assert journal.lines == ["a call"] * 3


DATA = {number: [number] for number in range(1000)}


class Reading(Naming):
    """Names data, too."""

    def collect(self, loss: torch.Tensor, losses: Any) -> None:
        LOSSES.append(loss * len(DATA[0]))


@pytest.mark.parametrize(("kind", "most"), [(Reading, 2), (Plain, 0)])
def test_only_what_leads_to_what_changes_is_looked_at_after_the_first_call(
    kind: type[Plain], most: int
) -> None:
    block = kind()
    recompute(block, compares=True)
    block(torch.randn(12, 16))
    forward: Any = block.forward
    assert len(forward._named) <= most < len(named_by(block))
    LOSSES.clear()


def tables_of(steps: int) -> torch.Tensor:
    if steps not in CACHE:
        CACHE[steps] = torch.arange(steps) / steps
    CACHE["last"] = CACHE[steps].clone()
    return CACHE[steps]


CACHE: dict[Any, torch.Tensor] = {}


class Caching(Plain):
    """Has tables of positions that all blocks compute once, as rotary ones."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + tables_of(inputs.shape[-1]))


def test_a_cache_of_a_file_is_filled_as_without_recomputation() -> None:
    expected = trained(blocks_of(Caching), lambda: 0.0)
    CACHE.clear()
    found = trained(blocks_of(Caching), lambda: 0.0, compares=True)
    assert all(map(torch.equal, expected, found))
    assert list(CACHE) == [16, "last"]


def test_router_logits_of_transformers_are_there_once() -> None:
    """Hooks of that library collect them, for the loss that balances experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    words = torch.randint(12, (4, 8))
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).train()
        if recomputed:
            for block in model.model.layers:
                recompute(block, compares=True)
        output = model(input_ids=words, labels=words)
        output.loss.backward()
        gradients = [each.grad for each in model.parameters()]
        assert len(output.router_logits) == 2
        found.append([output.loss, output.aux_loss, *gradients])
    assert all(map(torch.equal, *found))
