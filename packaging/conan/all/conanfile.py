# SPDX-License-Identifier: MIT
import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, get, rmdir

required_conan_version = ">=2.0"


class FsdpConan(ConanFile):
    name = "fsdp"
    description = "PyTorch's FSDP2 (ZeRO-3) for training programs in C, C++ and CUDA"
    license = "MIT"
    topics = ("deep-learning", "distributed-training", "fsdp", "zero")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False]}
    default_options = {"shared": False, "fPIC": True}
    implements = ["auto_shared_fpic"]
    languages = "C"

    def layout(self):
        cmake_layout(self, src_folder="src")

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"{self.ref} needs Linux")
        if self.settings.compiler not in ("gcc", "clang"):
            raise ConanInvalidConfiguration(f"{self.ref} needs gcc or clang")

    def source(self):
        get(self, **self.conan_data["sources"][self.version], strip_root=True)

    def generate(self):
        tc = CMakeToolchain(self)
        tc.cache_variables["FSDP_TOOLS"] = True
        tc.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()
        rmdir(self, os.path.join(self.package_folder, "lib", "cmake"))
        rmdir(self, os.path.join(self.package_folder, "lib", "pkgconfig"))
        rmdir(self, os.path.join(self.package_folder, "share"))

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "fsdp")
        headers = self.cpp_info.components["fsdp"]
        headers.set_property("cmake_target_name", "fsdp::fsdp")
        headers.set_property("pkg_config_name", "fsdp")
        headers.includedirs = [os.path.join("include", "fsdp")]
        headers.system_libs = ["pthread", "m"]
        compiled = self.cpp_info.components["lib"]
        compiled.set_property("cmake_target_name", "fsdp::lib")
        compiled.set_property("pkg_config_name", "fsdp-lib")
        compiled.libs = ["fsdp"]
        compiled.includedirs = []
        compiled.requires = ["fsdp"]
