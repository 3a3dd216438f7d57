"""Parameters of the communication graph."""

import pytest

from isthmus_privacy.secagg import graph

# (n, gamma, delta in thousandths): (k, t, c), client-drawn k-out graphs.
GRAPHS = {
    (10, 50, 50): (6, 4, 0),
    (30, 50, 50): (9, 6, 1),
    (100, 50, 50): (16, 11, 5),
    (300, 50, 50): (37, 26, 14),
    (1000, 50, 50): (51, 36, 20),
    (3000, 50, 50): (58, 41, 23),
    (10000, 50, 50): (61, 43, 24),
    (10, 50, 100): (9, 5, 0),
    (30, 50, 100): (12, 7, 1),
    (100, 50, 100): (26, 16, 5),
    (300, 50, 100): (52, 34, 15),
    (1000, 50, 100): (75, 50, 24),
    (3000, 50, 100): (86, 57, 27),
    (10000, 50, 100): (95, 63, 30),
    (10, 100, 100): (9, 6, 1),
    (30, 100, 100): (14, 9, 3),
    (100, 100, 100): (31, 21, 10),
    (300, 100, 100): (66, 46, 25),
    (1000, 100, 100): (96, 67, 37),
    (3000, 100, 100): (112, 78, 43),
    (10000, 100, 100): (121, 84, 46),
    (10, 100, 200): (9, 6, 1),
    (30, 100, 200): (17, 11, 3),
    (100, 100, 200): (51, 31, 10),
    (300, 100, 200): (117, 74, 30),
    (1000, 100, 200): (196, 125, 53),
    (3000, 100, 200): (244, 156, 67),
    (10000, 100, 200): (277, 177, 76),
    (10, 200, 200): (9, 6, 2),
    (30, 200, 200): (22, 15, 6),
    (100, 200, 200): (61, 41, 20),
    (300, 200, 200): (160, 109, 57),
    (1000, 200, 200): (301, 205, 108),
    (3000, 200, 200): (408, 278, 147),
    (10000, 200, 200): (479, 326, 172),
}


@pytest.mark.parametrize(("margins", "expected"), GRAPHS.items())
def test_parameters_of_client_drawn_graphs(margins, expected):
    clients, corrupt, dropped = margins
    assert graph.k_out(clients, clients * corrupt // 1000, clients * dropped // 1000) == expected


@pytest.mark.parametrize(
    ("clients", "corrupt", "threshold"),
    [(10, 50, 6), (30, 50, 16), (100, 50, 53), (128, 100, 71), (10, 200, 6), (30, 200, 18)],
)
def test_thresholds_of_the_complete_graph(clients, corrupt, threshold):
    parameters = graph.graph_parameters(
        clients, corrupt_permille=corrupt, dropout_permille=100, clients_min=2
    )
    assert parameters.complete
    assert parameters.threshold == threshold
