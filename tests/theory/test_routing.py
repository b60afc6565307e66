"""An even load of experts."""

from __future__ import annotations

from hybridpar.theory.routing import even_load


def test_the_first_experts_get_what_is_left_over() -> None:
    assert even_load(13, 5) == [3, 3, 3, 2, 2]
    assert even_load(0, 3) == [0, 0, 0]
