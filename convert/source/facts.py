"""A source in the form that `inspect` prints and `check` judges."""

from w4pack.convert.core.facts import DenseFacts, LayerFacts, ModelFacts
from w4pack.convert.source import online, written
from w4pack.convert.source.detect import Source
from w4pack.convert.source.layers import SourceLayer


def source_facts(source: Source) -> ModelFacts:
    """Describe the whole source in the form that `inspect` prints and `check` judges."""
    ck = source.checkpoint
    unfit, warnings = online.shown(online.problems_of(source)), written.warnings_of(source)
    return ModelFacts(
        config=source.config,
        quant_config=source.quant_config,
        quant_file=source.quant_file,
        layers=tuple(layer_facts(layer) for layer in source.layers),
        dense=tuple(DenseFacts(t.name, t.dtype, t.shape) for t in source.dense),
        evidence="all" if source.options.evidence == "all" else "sample",
        bytes_read=ck.store.bytes_read,
        total_bytes=sum(t.nbytes for t in ck.tensors.values()),
        files=tuple(ck.store.files()),
        weight_files=tuple(ck.weight_files),
        warnings=(*source.warnings, *warnings),
        unfit=unfit,
    )


def layer_facts(layer: SourceLayer) -> LayerFacts:
    """Describe one source layer."""
    scheme, stored = layer.scheme, _stored_size(layer)
    return LayerFacts(
        name=layer.name,
        layout=layer.layout,
        bits=scheme.bits,
        group_size=scheme.group_size,
        sym=scheme.sym,
        act_order="groups" if layer.order.kind == "uneven" else layer.order.kind,
        in_features=scheme.in_features,
        out_features=scheme.out_features,
        stored_in=stored[0],
        stored_out=stored[1],
        scale_dtype=scheme.scale_dtype,
        bias=layer.bias is not None,
        zero_kind=layer.zeros.kind,
        uneven=layer.order.kind == "uneven",
        ambiguous_zeros=layer.zeros.ambiguous,
        nbytes=sum(t.nbytes for t in layer.tensors.values()),
    )


def _stored_size(layer: SourceLayer) -> tuple[int, int]:
    """Return the rows and columns that a layer's codes tensor has room for: more than real ones if padded."""
    grid = layer.module.grid(layer.scheme.bits)
    shape = layer.tensors[grid.suffix].shape
    k, n = (shape[0], shape[1]) if grid.k_axis == 0 else (shape[1], shape[0])
    return k // grid.k_elems * grid.k_unit, n // grid.n_elems * grid.n_unit
