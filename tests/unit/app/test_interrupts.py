"""Signals become one exception that names them, and handlers are put back."""

import signal

import pytest

from app.interrupts import interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_by_name(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught, interruptible(), interruptible():
        signal.raise_signal(number)
    assert caught.value.args == (number,)
    assert signal.getsignal(number) == before


def test_a_library_that_raises_its_own_does_not_hide_the_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None
    assert caught.value.args == (signal.SIGTERM,)
