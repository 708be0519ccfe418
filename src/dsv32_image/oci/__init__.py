"""From what a container engine exported to a canonical OCI image.

The digest of the result depends on the content and metadata of files alone: not on the engine, its storage
driver, the host, the date or the number of processors. Order of use: `engine_export` finds the engine's
layers, `layer.scan_layer` reads one, `tree.Tree.apply` gives the state after it, `layer.write_tar` writes the
difference of two states and `layer.pack_layer` compresses it, `layout` puts layers and a config of our own
into an OCI layout, `loading` gives an engine the image without waiting for gzip.
"""

from dsv32_image.oci.engine_export import EngineExport, LayerSource, open_export
from dsv32_image.oci.layer import LayerBlob, LayerTar, ScannedLayer, pack_layer, scan_layer, write_tar
from dsv32_image.oci.layout import (
    ImageConfig,
    ImageDigest,
    NamedLayer,
    verify_layout,
    write_docker_archive,
    write_layout,
)
from dsv32_image.oci.loading import (
    LoadableImage,
    OpenLayer,
    loadable,
    loadable_layout,
    write_loading_layout,
)
from dsv32_image.oci.tree import Tree

__all__ = [
    "EngineExport",
    "ImageConfig",
    "ImageDigest",
    "LayerBlob",
    "LayerSource",
    "LayerTar",
    "LoadableImage",
    "NamedLayer",
    "OpenLayer",
    "ScannedLayer",
    "Tree",
    "loadable",
    "loadable_layout",
    "open_export",
    "pack_layer",
    "scan_layer",
    "verify_layout",
    "write_docker_archive",
    "write_layout",
    "write_loading_layout",
    "write_tar",
]
