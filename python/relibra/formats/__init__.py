"""Carriers of recorded routing, one module each; `load_routing` reads them all."""

from relibra.formats.loading import FORMATS, load_routing

__all__ = ["FORMATS", "load_routing"]
