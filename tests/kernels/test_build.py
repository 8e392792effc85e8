"""The build table and what it does with a compiler's log; a compile where the compiler is installed."""

import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from w4pack.kernels import build, compiler, moe_tiles, tiles
from w4pack.kernels.quarot import int_moe_tiles, int_tiles

SPILL = "ptxas info: Used 255 registers\n 16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads"
has_compiler, has_assembler = (
    importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec(f"nvidia.{name}") is not None
    for name in ("cuda_nvrtc", "cuda_nvcc")
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
                grouped = moe_tiles.all_tiles(table, bits, zeros)
                kind = f"moe_{dtype}_b{bits}_{tiles.ZEROS[zeros]}_"
                assert {moe_tiles.kernel_name(tile, dtype, bits, zeros) for tile in grouped} == {
                    entry for entry in built if entry.startswith(kind)
                }
                assert f"dequantize_{dtype}_b{bits}_{'zp' if zeros else 'sym'}" in built
        assert f"repack_b{bits}" in built
    assert "gather" in built


def test_a_transform_that_no_card_of_an_architecture_has_room_for_is_not_built() -> None:
    forms = {
        arch: {job.entry for job in build.jobs(arch) if job.source == "hadamard_dense.cu"}
        for arch in (*tiles.ARCHES, tiles.PTX_ARCH)
    }
    # m32_c10 is chosen from 17 rows of H on, m432_c6 from 177: 133 and 110 KiB, of 99 that a block may have
    large = {f"hadamard_{dtype}_{form}" for dtype in tiles.DTYPES for form in ("m32_c10", "m432_c6")}
    assert forms["sm_120"] == forms["sm_100"] - large and large < forms["sm_100"]
    assert forms["sm_80"] == forms["sm_90a"] == forms["sm_100"] == forms[tiles.PTX_ARCH]


@pytest.mark.parametrize("arch", tiles.ARCHES)
def test_every_tile_that_is_built_is_chosen_by_some_product(arch: str) -> None:
    sizes = [
        (n, k) for n in (512, 4096, 6144, 8192, 10240, 28672, 57344) for k in (64, 4096, 8192, 14336, 28672)
    ]
    rooms = {"sm_80": (99, 163), "sm_90a": (227,), "sm_100": (227,), "sm_120": (99,)}[arch]  # KiB a block
    few = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 320, 384, 511, 4095)
    cards = {"sm_80": (108, 46), "sm_90a": (132, 114), "sm_100": (148,), "sm_120": (170, 36)}[arch]
    products = [(card, m, n, k) for card in cards for m in few for n, k in sizes]
    each = (1, 4, 5, 6, 10, 12, 15, 18, 26, 42, 50, 74, 92, 200)  # pairs an expert
    for bits in (4, 8):
        chosen = {
            tiles.choose(arch, card, room << 10, m, *size, bits).tile
            for room in rooms
            for card, m, *size in products
            if m < tiles.dense_from(arch)
        }
        assert chosen == set(tiles.all_tiles(arch, bits))
        for zeros in (False, True):
            grouped = {
                moe_tiles.choose(arch, 132, pairs * experts, experts, n, k, bits, zeros).tile
                for pairs in each
                for experts in (1, 8, 128)
                for n, k in (*sizes, (768, 2048), (1536, 2048))
            }
            assert grouped == set(moe_tiles.all_tiles(arch, bits, zeros))
    for order in int_tiles.KINDS:
        found = {(g, int_tiles.choose(arch, *p, order, g)) for g in tiles.GROUP_SIZES for p in products}
        named = {
            int_tiles.kernel_name(one.tile, dtype, order, int_tiles.group_steps(one.tile, order, group))
            for group, one in found
            if one is not None
            for dtype in tiles.DTYPES
        }
        built = {file.entry for file in int_tiles.files(arch)}
        assert named == {entry for entry in built if int_tiles.KINDS[order] in entry}
        for grouped_scales in (False, True):
            group = 128 if grouped_scales else -1
            launches = (int_moe_tiles.choose(arch, 132, 8 * p, 8, 4096, 4096, order, group) for p in each)
            taken = {one.tile for one in launches if one is not None}
            assert taken == set(int_moe_tiles.all_tiles(arch, order, grouped_scales))


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


@pytest.mark.parametrize("how", ["torn", "exchanged", "gone", "spilling"])
def test_a_file_that_is_not_what_its_row_says_is_made_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build.Job("gather.cu", "a", "sm_80", ())
    monkeypatch.setattr(build, "ALLOWED_SPILLS", 64)
    monkeypatch.setattr(
        build, "compile_job", lambda _: build.Compiled(b"code", SPILL if how == "spilling" else "")
    )
    build.write_manifest(build.build([job], 1, tmp_path)[0], tmp_path)
    assert build.due([job], tmp_path) == []
    file = tmp_path / job.path
    if how == "spilling":
        monkeypatch.setattr(build, "ALLOWED_SPILLS", 0)
    elif how == "gone":
        file.unlink()
    else:
        file.write_bytes(b"co" if how == "torn" else b"edoc")
    assert build.due([job], tmp_path) == [job]


def test_a_build_that_was_stopped_keeps_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [build.Job("gather.cu", name, "sm_80", ()) for name in "abc"]

    def compile_job(job: build.Job) -> build.Compiled:
        if job.entry == "c":
            raise KeyboardInterrupt
        return build.Compiled(job.entry.encode(), "")

    monkeypatch.setattr(build, "compile_job", compile_job)
    with pytest.raises(KeyboardInterrupt):
        build.build(wanted, 1, tmp_path)
    assert build.due(wanted, tmp_path) == wanted[2:]
    with (tmp_path / "manifest.part").open("a") as notes:
        notes.write('{"path": "sm_80-')  # stopped in the middle of a row
    (tmp_path / "manifest.json").write_text('{"nvrtc": "12.9", "files": [{"pa')
    assert build.due(wanted, tmp_path) == wanted[2:]
    monkeypatch.setattr(build, "compile_job", lambda job: build.Compiled(job.entry.encode(), ""))
    rows, _ = build.build(wanted, 1, tmp_path)
    build.write_manifest(rows, tmp_path)
    assert [row["path"] for row in rows] == [job.path for job in wanted]
    assert not (tmp_path / "manifest.part").exists() and build.due(wanted, tmp_path) == []


def test_a_source_that_no_longer_compiles_leaves_no_earlier_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compile_job", lambda _: build.Compiled(b"code", ""))
    build.write_manifest(
        build.build([build.Job("gather.cu", "a", "sm_80", ("X=1",))], 1, tmp_path)[0], tmp_path
    )

    def fails(job: build.Job) -> build.Compiled:
        raise build.BuildError("no")

    monkeypatch.setattr(build, "compile_job", fails)
    rows, failures = build.build([build.Job("gather.cu", "a", "sm_80", ("X=2",))], 1, tmp_path)
    assert failures == ["no"] and rows == [] and not list(tmp_path.glob("*.cubin"))


@pytest.mark.parametrize("changed", ["versions", "module"])
def test_how_code_is_made_is_part_of_a_files_key(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build.Job("gather.cu", "a", "sm_80", ())
    before = build.key_of(job)
    compiler.identity.cache_clear()
    if changed == "versions":
        monkeypatch.setattr(compiler, "_version_of", lambda package: "12.9.1")
    else:
        monkeypatch.setattr(compiler, "__file__", str(Path(build.__file__)))
    try:
        assert build.key_of(job) != before
    finally:
        compiler.identity.cache_clear()


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


PTX = b"""//
.version 8.8
.target %s
.visible .entry a()
{
	// begin inline asm
	griddepcontrol.launch_dependents;
	// end inline asm
	// begin inline asm
	griddepcontrol.wait;
	// end inline asm
	ret;
}
"""


def test_the_ptx_that_a_file_is_made_of_is_part_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    job = build.Job("gather.cu", "a", "sm_100", ())
    keys = {build.key_of(build.Job("gather.cu", "a", arch, ())) for arch in build.ORDER}
    assert len(keys) == len(build.ORDER) and build.key_of(job) in keys
    monkeypatch.setitem(build.PTX_OF, "sm_100", "compute_100")
    assert build.key_of(job) not in keys


@pytest.mark.parametrize(
    "words", [("--arch", "sm_89"), ("--jobs", "0"), ("--only", "["), ("--tiles", "/nothing")]
)
def test_wrong_words_are_told_in_a_line(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(words)
    assert words[0] in capsys.readouterr().err.splitlines()[-1]


def test_what_has_the_same_defines_is_one_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, assembled = [], []

    def compile_job(job: build.Job) -> build.Compiled:
        compiled.append(job.arch)
        return build.Compiled(b"code of " + job.arch.encode(), "Used 9 registers", PTX % job.arch.encode())

    def assemble(ptx: bytes, arch: str) -> build.Compiled:
        assembled.append((arch, ptx))
        return build.Compiled(b"assembled", "Used 8 registers", ptx)

    monkeypatch.setattr(build, "compile_job", compile_job)
    monkeypatch.setattr(build, "assemble", assemble)
    arches = ("compute_80", "sm_120", "sm_100", "sm_80", "sm_90a")
    wanted = [build.Job("gather.cu", "a", arch, ()) for arch in arches]
    rows, failures = build.build(wanted, 1, tmp_path)
    without = b"//\n.version 8.8\n.target sm_80\n.visible .entry a()\n{\n\tret;\n}\n"
    assert not failures and compiled == ["sm_90a"]
    later = [(arch, PTX % arch.encode()) for arch in ("sm_100", "sm_120")]
    assert assembled == [*later, ("sm_80", without)]
    assert (tmp_path / "compute_80-a.ptx").read_bytes() == without
    assert {str(row["path"]): row["registers"] for row in rows} == {
        "compute_80-a.ptx": 0,
        "sm_80-a.cubin": 8,
        "sm_90a-a.cubin": 9,
        "sm_100-a.cubin": 8,
        "sm_120-a.cubin": 8,
    }
    build.write_manifest(rows, tmp_path)
    (tmp_path / "compute_80-a.ptx").unlink()
    build.build(wanted, 1, tmp_path)
    assert compiled[1:] == ["compute_80"] and len(assembled) == 3
    assert (tmp_path / "compute_80-a.ptx").read_bytes() == b"code of compute_80"


def test_what_cannot_be_assembled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def assemble(ptx: bytes, arch: str) -> build.Compiled:
        raise build.BuildError("fatal")

    monkeypatch.setattr(build, "compile_job", lambda job: build.Compiled(b"code", "", PTX % b"sm_90a"))
    monkeypatch.setattr(build, "assemble", assemble)
    wanted = [build.Job("gather.cu", "a", arch, ()) for arch in ("sm_90a", "sm_100")]
    rows, failures = build.build(wanted, 1, tmp_path)
    assert not rows and failures == ["sm_100-a.cubin cannot be assembled\nfatal"]


def test_other_defines_are_another_compile() -> None:
    same = [build.Job("gather.cu", "a", arch, ("X=1",)) for arch in ("sm_80", "sm_120", "sm_90a")]
    other = build.Job("gather.cu", "a", "sm_80", ("X=2",))
    groups = build.of_one_compile([*same, other])
    assert sorted(groups, key=str) == sorted([[same[2], same[1], same[0]], [other]], key=str)


def test_the_assembler_is_asked_for_where_a_cubin_is_not_the_compilers() -> None:
    cubins = [build.Job("gather.cu", "a", arch, ()) for arch in ("sm_80", "sm_90a")]
    ptx = build.Job("gather.cu", "a", "compute_80", ())
    assert build.needs_assembler(build.of_one_compile([*cubins, ptx]))
    assert not build.needs_assembler(build.of_one_compile([cubins[0], ptx]))
    assert build.needs_assembler(build.of_one_compile([build.Job("gather.cu", "a", "sm_100", ())]))


def test_a_spill_in_assembled_code_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compile_job", lambda job: build.Compiled(b"code", "", PTX % b"sm_100"))
    monkeypatch.setattr(build, "assemble", lambda ptx, arch: build.Compiled(b"code", SPILL, ptx))
    wanted = [build.Job("gather.cu", "a", arch, ()) for arch in ("sm_100", "sm_120")]
    rows, failures = build.build(wanted, 1, tmp_path)
    assert not rows and len(failures) == 1 and failures[0].startswith("sm_120-a.cubin spills 64 bytes")


def test_sources_do_not_tell_architectures_apart() -> None:
    """But for programmatic launch, which ``retarget`` takes out, and wgmma, whose tiles only sm_90a has."""
    told = {
        file.name: re.findall(r"__CUDA_ARCH\w*(?: >= \d+)?", file.read_text())
        for file in build.SOURCES.glob("*.cu*")
    }
    assert {name: found for name, found in told.items() if found} == {
        "ptx.cuh": ["__CUDA_ARCH__ >= 900"] * 2,
        "moe.cu": ["__CUDA_ARCH_FEAT_SM90_ALL"] * 2,
    }


def test_an_assembler_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    program.chmod(0o755)
    monkeypatch.setattr(compiler, "_installed", lambda package, file: iter([program]))
    with pytest.raises(build.BuildError, match=r"is 13\.0, expected 12\.9\n\nhint: pip install"):
        compiler.assembler.__wrapped__()
    program.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
    assert compiler.assembler.__wrapped__() == program


def test_a_missing_assembler_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_installed", lambda package, file: iter(()))
    with pytest.raises(build.BuildError, match=r"nvidia-cuda-nvcc-cu12 is not installed\n\nhint: pip"):
        compiler.assembler.__wrapped__()


def test_the_build_imports_no_torch() -> None:
    code = "import sys, w4pack.kernels.build; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def sections(code: bytes) -> dict[str, bytes]:
    """Return a cubin's sections with contents by name, without the note of the tool that made it."""
    start, count, names = *struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HH", code, 60)
    heads = [struct.unpack_from("<IIQQQQ", code, start + 64 * i) for i in range(count)]
    texts = heads[names][4]
    named = {code[texts + head[0] :].split(b"\0", 1)[0].decode(): head for head in heads}
    empty = 8  # a section that takes no room in the file
    return {
        name: code[offset : offset + size]
        for name, (_, kind, _, _, offset, size) in named.items()
        if kind != empty and name != ".note.nv.tkinfo"
    }


@pytest.mark.skipif(not has_assembler, reason="needs the assembler nvidia-cuda-nvcc-cu12")
@pytest.mark.parametrize(
    ("first", "arch", "entry"),
    [
        ("sm_90a", "sm_80", "hadamard_fp16_m16_c6_heads"),
        ("sm_90a", "sm_80", "kv_append_64"),
        ("sm_90a", "sm_100", "hadamard_fp16_m16_c6_heads"),
        ("sm_90a", "sm_120", "quantize_fp16_p2w7"),
        ("sm_100", "sm_120", "w4a16_fp16_b4_sym_mma_t8"),
        ("sm_100", "sm_80", "moe_bf16_b4_zp_mma_t8"),
    ],
)
def test_assembled_code_is_that_of_a_compile(first: str, arch: str, entry: str) -> None:
    one, other = (
        next(job for job in build.jobs(name) if job.entry.startswith(entry)) for name in (first, arch)
    )
    assert build.of_one_compile([other, one]) == [[one, other]]
    ptx = compiler.retarget(build.compile_job(one).ptx, arch)
    made, own = compiler.assemble(ptx, arch), build.compile_job(other)
    found, expected = sections(made.code), sections(own.code)
    assert found == expected and len(expected[f".text.{one.entry}"]) > 1000
    assert (made.registers, made.spills) == (own.registers, own.spills)
    assert ptx == own.ptx


@pytest.mark.skipif(not has_assembler, reason="needs the assembler nvidia-cuda-nvcc-cu12")
def test_ptx_that_is_none_is_refused() -> None:
    with pytest.raises(build.BuildError, match="fatal"):
        compiler.assemble(b".version 8.8\n.target sm_80\n.address_size 64\nnonsense\n\0", "sm_80")


@pytest.mark.skipif(not has_compiler, reason="the compiler nvidia-cuda-nvrtc-cu12 is not installed")
def test_the_ptx_of_a_cubin_is_that_of_its_own_compile() -> None:
    real, portable = (
        next(job for job in build.jobs(arch) if job.entry == "repack_b4")
        for arch in ("sm_80", tiles.PTX_ARCH)
    )
    assert build.compile_job(real).ptx == build.compile_job(portable).code


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
