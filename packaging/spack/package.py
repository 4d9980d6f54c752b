# SPDX-License-Identifier: MIT
from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Fsdp(CMakePackage):
    """PyTorch's FSDP2 (ZeRO-3) for training programs in C, C++ and CUDA: headers, a compiled library,
    and the launcher fsdprun."""

    url = "@URL@"

    license("MIT")

    version("0.3.0", sha256="@SHA256@")

    variant("shared", default=True, description="Build a shared library instead of a static one")
    variant("tools", default=True, description="Build fsdpck, fsdpfit and fsdptrace")

    depends_on("c", type="build")
    depends_on("cmake@3.17:", type="build")

    requires("platform=linux", msg="fsdp needs Linux")

    def cmake_args(self):
        return [
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("FSDP_TOOLS", "tools"),
        ]
