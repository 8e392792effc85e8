"""``w4pack bench`` on a card: it runs, its products are right, its rates are those of a card."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402

from w4pack import cli  # noqa: E402
from w4pack.kernels.bench import cards, products, rates, timing  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    "options",
    [
        ("--bits", "4"),
        ("--bits", "8", "--group-size", "64"),
        ("--group-size", "-1", "--dtype", "bfloat16"),
        ("--act-bits", "4"),
        ("--act-bits", "8", "--bits", "8", "--group-size", "-1"),
    ],
    ids=" ".join,
)
def test_shapes_run_at_every_m_and_are_right(options: tuple[str, ...]) -> None:
    shapes = ("--shape", "1024x2048", "--shape", "64x4096")
    done = CliRunner().invoke(cli.root, ["bench", *shapes, *options, "--m", "1,17,300,5000", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["card"] == torch.cuda.get_device_name()
    limit = products.MOST_UNITS * products.UNITS[getattr(torch, data["dtype"])]
    points = [point for shape in data["shapes"] for point in shape["points"]]
    assert [point["m"] for point in points] == [1, 17, 300, 5000] * 2
    for point in points:
        assert 0 < point["error"] < limit and 0 < point["library_error"] < limit
        assert point["seconds"] > 0 and point["library_seconds"] > 0


def test_the_rates_lie_between_the_bus_and_what_no_card_has() -> None:
    found = rates.measure(torch.device("cuda"), torch.float16)
    assert 1e11 < found.read < 3e13
    assert 1e12 < found.operations < 2e16
    assert found.integers == 0
    assert 1e12 < rates.measure(torch.device("cuda"), torch.float16, integers=True).integers < 4e16


def test_a_graph_holds_whole_rounds() -> None:
    x, y = torch.ones(1 << 20, device="cuda"), [torch.zeros(1 << 20, device="cuda") for _ in range(7)]
    found = timing.Candidate("add", lambda i: y[i].add_(x), 7)
    found.capture()
    assert found.launches % 7 == 0
    before = [float(t[0]) for t in y]
    found.sample()
    added = {float(t[0]) - b for t, b in zip(y, before, strict=True)}
    assert added == {(1 + timing.TIMED_REPLAYS) * found.launches / 7}
    assert found.median > 0


def test_a_card_is_found() -> None:
    assert cards.find() == torch.device("cuda", torch.cuda.current_device())
