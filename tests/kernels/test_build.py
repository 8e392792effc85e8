"""The build table and what it does with a compiler's log; a compile where the compiler is installed."""

import importlib.util
from pathlib import Path

import pytest

from w4pack.kernels import build, moe_tiles, tiles

SPILL = "ptxas info: Used 255 registers\n 16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads"
has_compiler = importlib.util.find_spec("nvidia") is not None and (
    importlib.util.find_spec("nvidia.cuda_nvrtc") is not None
)


@pytest.mark.parametrize("arch", [*tiles.ARCHES, tiles.PTX_ARCH])
def test_every_kernel_a_launch_can_name_is_built(arch: str) -> None:
    built = {job.entry for job in build.jobs(arch)}
    table = "sm_80" if arch == tiles.PTX_ARCH else arch
    for bits in (4, 8):
        for dtype in tiles.DTYPES:
            for zeros in (False, True):
                for tile in tiles.all_tiles(table, bits):
                    assert tiles.kernel_name(tile, dtype, bits, zeros) in built
                for tile in moe_tiles.all_tiles(table, bits):
                    assert moe_tiles.kernel_name(tile, dtype, bits, zeros) in built
                assert f"dequantize_{dtype}_b{bits}_{'zp' if zeros else 'sym'}" in built
        assert f"repack_b{bits}" in built
    assert "gather" in built


def test_names_are_unique_and_wgmma_stays_on_its_architecture() -> None:
    for arch in (*tiles.ARCHES, tiles.PTX_ARCH):
        paths = [job.path for job in build.jobs(arch)]
        assert len(set(paths)) == len(paths)
        if arch != "sm_90a":
            assert not any("wgmma" in path or "tma" in path for path in paths)


def test_the_log_says_registers_spills_and_serialized_products() -> None:
    found = build.Compiled(b"", SPILL)
    assert (found.registers, found.spills, found.serialized) == (255, 64, "")


NOTE = (
    "ptxas info : (%s) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a cause"
)


@pytest.mark.parametrize("number", ["C7510", "C7511", "C7514", "C7518", "C7520", "C7599"])
def test_products_that_wait_for_one_another_fail_the_build(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = f"ptxas info : 0 bytes gmem\n{NOTE % number}\nptxas info : Used 168 registers"
    monkeypatch.setattr(build, "compile_job", lambda _: build.Compiled(b"code", log))
    rows, failures = build.build([build.Job("gather.cu", "a", "sm_90a", (), hot=False)], 1, tmp_path)
    assert not rows and len(failures) == 1 and NOTE % number in failures[0]


def test_a_spill_in_a_hot_kernel_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compile_job", lambda job: build.Compiled(b"code", SPILL))
    hot, cold = build.Job("gather.cu", "a", "sm_80", ()), build.Job("gather.cu", "b", "sm_80", (), hot=False)
    rows, failures = build.build([hot, cold], 1, tmp_path)
    assert [row["path"] for row in rows] == ["sm_80-b.cubin"]
    assert len(failures) == 1 and "spills 64 bytes" in failures[0]


def test_a_file_is_kept_until_its_inputs_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_job(job: build.Job) -> build.Compiled:
        compiled.append(job.entry)
        return build.Compiled(b"code", "")

    monkeypatch.setattr(build, "compile_job", compile_job)
    for defines in (("X=1",), ("X=1",), ("X=2",)):
        rows, _ = build.build([build.Job("gather.cu", "a", "sm_80", defines)], 1, tmp_path)
        build.write_manifest(rows, tmp_path)
    assert compiled == ["a", "a"]


def test_a_build_keeps_what_another_has_finished_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (build.Job("gather.cu", name, "sm_80", ()) for name in "ab")

    def compile_job(job: build.Job) -> build.Compiled:
        if job is one:
            build.write_manifest(build.build([other], 1, tmp_path)[0], tmp_path)
        return build.Compiled(b"code", "")

    monkeypatch.setattr(build, "compile_job", compile_job)
    rows, failures = build.build([one], 1, tmp_path)
    assert not failures and [row["path"] for row in rows] == ["sm_80-a.cubin", "sm_80-b.cubin"]


def test_a_cubin_and_its_ptx_are_one_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_job(job: build.Job) -> build.Compiled:
        compiled.append(job.arch)
        return build.Compiled(b"code of " + job.arch.encode(), "Used 9 registers", b"ptx")

    monkeypatch.setattr(build, "compile_job", compile_job)
    wanted = [build.Job("gather.cu", "a", arch, ()) for arch in ("compute_80", "sm_90a", "sm_80")]
    rows, _ = build.build(wanted, 1, tmp_path)
    assert compiled == ["sm_90a", "sm_80"]
    assert (tmp_path / "compute_80-a.ptx").read_bytes() == b"ptx"
    assert {str(row["path"]): row["registers"] for row in rows} == {
        "compute_80-a.ptx": 0,
        "sm_80-a.cubin": 9,
        "sm_90a-a.cubin": 9,
    }
    build.write_manifest(rows, tmp_path)
    (tmp_path / "compute_80-a.ptx").unlink()
    build.build(wanted, 1, tmp_path)
    assert compiled[2:] == ["compute_80"]
    assert (tmp_path / "compute_80-a.ptx").read_bytes() == b"code of compute_80"


@pytest.mark.skipif(not has_compiler, reason="the compiler nvidia-cuda-nvrtc-cu12 is not installed")
def test_the_ptx_of_a_cubin_is_that_of_its_own_compile() -> None:
    real, portable = (
        next(job for job in build.jobs(arch) if job.entry == "repack_b4")
        for arch in ("sm_80", tiles.PTX_ARCH)
    )
    assert build.compile_job(real).portable.code == build.compile_job(portable).code


@pytest.mark.skipif(not has_compiler, reason="the compiler nvidia-cuda-nvrtc-cu12 is not installed")
@pytest.mark.parametrize(
    ("arch", "entry"),
    [("sm_80", "w4a16_fp16_b4_sym_mma_t8"), ("sm_90a", "wgmma_t64"), ("sm_90a", "moe_bf16_b4_zp_wgmma_t48")],
)
def test_a_hot_kernel_compiles_without_spills(arch: str, entry: str) -> None:
    job = next(job for job in build.jobs(arch) if entry in job.entry)
    found = build.compile_job(job)
    assert found.spills == 0 and not found.serialized and found.registers > 0 and len(found.code) > 10_000


WAITING = """
extern "C" __global__ void example(float *out, unsigned long long a, unsigned long long b) {
  float d[4] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    d[0] += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = d[i];
}
"""


@pytest.mark.skipif(not has_compiler, reason="nvidia-cuda-nvrtc-cu12 is not installed")
def test_what_the_assembler_says_of_waiting_products_is_understood(tmp_path: Path) -> None:
    (tmp_path / "example.cu").write_text(WAITING)
    assert "serialized" in build.compile_source(tmp_path / "example.cu", "sm_90a", ()).serialized


def test_a_whole_build_leaves_nothing_stale(tmp_path: Path) -> None:
    wanted = [job for job in build.jobs("sm_80") if job.entry.startswith("repack")]
    for name in (wanted[0].path, "sm_80-w4a16_old.cubin", "sm_90a-w4a16_other.cubin"):
        (tmp_path / name).write_bytes(b"code")
    rows: list[dict[str, object]] = [{"path": wanted[0].path}, {"path": "sm_80-w4a16_old.cubin"}]
    assert build.prune(rows, wanted, tmp_path) == [{"path": wanted[0].path}]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {wanted[0].path, "sm_90a-w4a16_other.cubin"}  # of other architectures nothing is known


def test_a_product_cannot_start_while_its_weights_are_repacked() -> None:
    csrc = Path(build.__file__).parent / "csrc"
    texts = {file.name: file.read_text() for file in csrc.glob("*.cu*")}
    early = {name for name, text in texts.items() if "ptx::launch_dependents()" in text}
    assert {"producer.cuh", "w4a16.cuh", "int_mma.cu"} <= early
    assert "repack.cu" not in early and not any(f'"{name}"' in texts["repack.cu"] for name in early)
