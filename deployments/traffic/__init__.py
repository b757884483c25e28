"""A pipeline over photographs: find vehicles and people, then look at each of them closely."""

from .app import Detect, Faces, Vehicles, detectors, payloads, photographs, pipeline

__all__ = ["Detect", "Faces", "Vehicles", "detectors", "payloads", "photographs", "pipeline"]
