"""The machine is named in a form that a reader can compare."""

from tests.bench.machine import cpu_model, describe


def test_the_processor_is_named_as_the_kernel_names_it() -> None:
    assert cpu_model("processor : 0\nmodel name : AMD EPYC 9B14\nflags : fpu\n") == "AMD EPYC 9B14"
    assert cpu_model("processor : 0\n") != ""


def test_this_machine_can_be_described() -> None:
    machine = describe()
    assert machine.cores >= 1
    assert machine.python.startswith("CPython 3.")
