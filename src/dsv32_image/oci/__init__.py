"""From what a container engine exported to a canonical OCI image.

The digest of the result depends on the content and metadata of files alone: not on the engine, its storage
driver, the host, the date or the number of processors. Order of use: `engine_export` finds the engine's
layers, `layer.scan_layer` reads one, `tree.Tree.apply` gives the state after it, `layer.write_layer` writes
the difference of two states, `layout` puts layers and a config of our own into an OCI layout.
"""

from dsv32_image.oci.engine_export import EngineExport, LayerSource, open_export
from dsv32_image.oci.layer import LayerBlob, ScannedLayer, scan_layer, write_layer
from dsv32_image.oci.layout import (
    ImageConfig,
    ImageDigest,
    NamedLayer,
    verify_layout,
    write_docker_archive,
    write_layout,
)
from dsv32_image.oci.loading import write_loading_layout
from dsv32_image.oci.tree import Tree

__all__ = [
    "EngineExport",
    "ImageConfig",
    "ImageDigest",
    "LayerBlob",
    "LayerSource",
    "NamedLayer",
    "ScannedLayer",
    "Tree",
    "open_export",
    "scan_layer",
    "verify_layout",
    "write_docker_archive",
    "write_layer",
    "write_layout",
    "write_loading_layout",
]
