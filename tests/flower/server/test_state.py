"""The state of a Flower strategy between rounds."""

import numpy as np
import pytest

from isthmus.errors import UserError
from isthmus_flower import messages  # before flwr
from isthmus_flower.server.state import StrategyState, check_storable


def test_a_strategy_whose_state_cannot_be_stored_is_refused_before_the_run():
    from flwr.serverapp.strategy import FedAvg

    with messages.captured_warnings():
        strategy = FedAvg()
    strategy.model = object()
    with pytest.raises(UserError, match="FedAvg keeps a object in 'model', which cannot be stored"):
        check_storable(strategy)
    strategy.model = np.zeros(2)
    with pytest.raises(UserError, match="keeps arrays in 'model' that are not float32"):
        check_storable(strategy)


def test_state_is_only_what_changed():
    from flwr.serverapp.strategy import FedAvg

    with messages.captured_warnings():
        assert StrategyState.of(FedAvg(), FedAvg()) == StrategyState()
