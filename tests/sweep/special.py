"""What general rules cannot know, one entry for a class."""

from __future__ import annotations

from typing import Any

CONFIGURATIONS: dict[str, dict[str, Any]] = {}

SPECIAL: dict[str, dict[str, Any]] = {}
"""Makers of inputs by name; None: leave it out."""
