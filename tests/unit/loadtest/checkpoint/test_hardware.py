"""What nvidia-smi reports."""

from collections.abc import Sequence

from loadtest.checkpoint.machine import NotReported, hardware

_XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>570.86.15</driver_version>
  <cuda_version>12.8</cuda_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:0F:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <uuid>GPU-1</uuid>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <pci><pci_gpu_link_info>
      <pcie_gen><current_link_gen>5</current_link_gen></pcie_gen>
      <link_widths><current_link_width>16x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <fb_memory_usage><total>81559 MiB</total></fb_memory_usage>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
    <clocks><sm_clock>345 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
    <applications_clocks><graphics_clock>N/A</graphics_clock></applications_clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></max_clocks>
  </gpu>
</nvidia_smi_log>
"""


def test_a_gpu_reports_its_mode_and_clocks() -> None:
    def ask(arguments: Sequence[str]) -> str:
        return _XML if "-x" in arguments else "        GPU0\nGPU0     X\n"

    found = hardware(ask)
    assert (found.no_gpu, found.driver, found.cuda) == (None, "570.86.15", "12.8")
    [gpu] = found.gpus
    assert (gpu.mig, gpu.ecc, gpu.power_limit, gpu.pcie) == ("Disabled", "Enabled", "700.00 W", "gen 5 x 16x")
    assert (gpu.clocks["sm"], gpu.clocks["sm max"], gpu.clocks["sm set"]) == ("345 MHz", "1980 MHz", "N/A")
    assert found.topology.startswith("GPU0")


def test_no_gpu_is_said_plainly() -> None:
    def none(_: Sequence[str]) -> str:
        raise NotReported("nvidia-smi is not installed here")

    assert hardware(none).no_gpu == "no GPU: nvidia-smi is not installed here"
    assert "lists none" in (hardware(lambda _: "<nvidia_smi_log/>").no_gpu or "")
    assert "no XML" in (hardware(lambda _: "Failed to initialize NVML").no_gpu or "")
