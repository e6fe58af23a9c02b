"""Recipes of low precision, which are imported and not used."""

from . import recipe as recipe
