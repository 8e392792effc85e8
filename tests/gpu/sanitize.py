"""A few products of every tile, small enough for compute-sanitizer (``run_all.sh sanitizer``)."""

import torch

from w4pack.kernels import launch, ops, reference, tiles


def main() -> None:
    """Run each tile on shapes with odd ends, and every other operator once."""
    card = launch.device(0)
    for bits in (4, 8):
        for tile in tiles.all_tiles(launch.table_arch(card.arch), bits):
            for m, k, n, group in ((3, 5 * tile.unit, 192, 32), (tile.tokens + 1, 1024, 320, 128)):
                words = torch.randint(
                    -(2**31), 2**31 - 1, (k // 16, n * bits // 2), device="cuda", dtype=torch.int32
                )
                scales = torch.rand((-(-k // group), n), device="cuda").half()
                zeros = torch.randint(
                    0, 2**31 - 1, (scales.shape[0], n * bits // 32), device="cuda", dtype=torch.int32
                )
                x = torch.randn(m, k, device="cuda").half()
                out = torch.empty(m, n, device="cuda", dtype=torch.float16)
                chosen = tiles.Launch(tile, min(8, tiles.grid(tile, card.multiprocessors, m, n, k)))
                ops.run_gemm(x, words, scales, zeros, None, bits, group, out, k, n, chosen)
                exact = x.double() @ reference.dense(words, scales, zeros, bits, group, torch.float64)
                assert float((out.double() - exact).norm() / exact.norm()) < 1e-3, (tile, m, k, n)
        words = torch.randint(-(2**31), 2**31 - 1, (320 * bits // 32, 192), device="cuda", dtype=torch.int32)
        ops.repack(words, torch.randperm(320, device="cuda").int(), bits)
    ops.gather(torch.randn(3, 200, device="cuda").half(), torch.randperm(200, device="cuda").int(), 256)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
