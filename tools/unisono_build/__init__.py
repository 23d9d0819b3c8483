"""How unisono becomes a wheel.

A wheel has four parts: the Python package with ``_core.abi3.so``, which maturin builds; one
``core-torch-2.N.so`` for each minor version of torch that it serves; the C library with its
headers; and the sources of the second, from which an installed unisono builds a door for a torch
that is newer than the wheel. That of a release has two more modules ``_core``, for Pythons without
a GIL.

- ``backend``: the hooks that pip and other front ends call (PEP 517), for the torch that is there;
- ``release``: ``make wheel``, for every torch and an old glibc, the same bytes each time;
- ``parts``: builds the parts;
- ``licences``: those of the crates inside;
- ``assemble``: puts them into the wheel that maturin made;
- ``sources``: the archive inside the wheel, and the source distribution;
- ``toolchain``: what has to be installed, and says so before a build starts;
- ``torches``: finds torch's headers and libraries, or fetches them.

It runs before anything is installed: apart from ``backend`` and ``release`` it needs the standard
library alone, and ``python -m unisono build-torch`` uses ``parts`` in that way.
"""
