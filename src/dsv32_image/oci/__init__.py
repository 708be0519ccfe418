"""From what a container engine exported to a canonical OCI image.

The digest of the result depends on the content and metadata of files alone: not on the engine, its storage
driver, the host, the date or the number of processors. Order of use: `engine_export` finds the engine's
layers, `layer.scan_layer` reads one, `tree.Tree.apply` gives the state after it, `layer.write_layer` writes
the difference of two states, `layout` puts layers and a config of our own into an OCI layout.
"""
