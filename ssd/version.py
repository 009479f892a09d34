"""The version of the package, where everything can see it."""

VERSION = "0.1.0"
