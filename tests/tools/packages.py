#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""packages.py - what the gates `package` run: other build systems, and the recipes of packaging/, on
a release of this tree. packages.py NAME runs the function NAME; exit status 77: this machine cannot
run it, and the last line says why."""
import glob
import hashlib
import os
import sys
import types

import test_package
from harness import Skip, check, sh
from test_package import CLEAN, ROOT, inside, make, needs, once, version

MESON = """project('user', 'c', default_options: 'c_std=c99')
m = meson.get_compiler('c').find_library('m')
headers = executable('headers', '01_hello.c', dependencies: dependency('fsdp'))
executable('compiled', 'user.c', dependencies: [dependency('fsdp-lib'), m])
test('two ranks', find_program('fsdprun'), args: ['-n', '2', headers])
"""


@once
def filled():
    """The recipes, filled in for a release that is a file here."""
    make("dist", os.getcwd())
    sh(f"{ROOT}/packaging/fill.sh file://{os.getcwd()}/fsdp-{version()}.tar.gz"
       f" fsdp-{version()}.tar.gz recipes")


def archive():
    return f"{filled()}/fsdp-{version()}.tar.gz"


@needs("meson", "ninja")
def meson():
    """As a subproject, and by pkg-config after an installation, which is that of make."""
    with open("meson.build", "w", encoding="utf-8") as f:
        f.write(MESON)
    os.mkdir("subprojects")
    os.symlink(ROOT, "subprojects/fsdp")
    sh("meson setup build --buildtype=debug && ninja -C build && meson test -C build", env=CLEAN)
    check(not os.path.exists("build/subprojects/fsdp/fsdpck"), "tools that nobody asked for")
    for program in ("headers", "compiled"):
        test_package.trains(f"build/{program}")
    os.remove("subprojects/fsdp")
    here = os.getcwd()
    sh(f"meson setup fsdp {ROOT} --buildtype=debug --prefix={here}/prefix --libdir=lib -Dtools=disabled"
       " && ninja -C fsdp && meson install -C fsdp", env=CLEAN)
    env = dict(CLEAN, PATH=f"{here}/prefix/bin:{CLEAN['PATH']}", LD_LIBRARY_PATH=f"{here}/prefix/lib",
               PKG_CONFIG_PATH=f"{here}/prefix/share/pkgconfig:{here}/prefix/lib/pkgconfig")
    sh("meson setup installed --buildtype=debug && ninja -C installed && meson test -C installed", env=env)
    for same in ("include", "share", "lib/pkgconfig"):
        sh(f"diff -r {test_package.made()}/prefix/{same} prefix/{same}")


@needs("conan")
def conan():
    """conan create with the recipe, from an empty cache and without a remote, for both libraries."""
    env = {k: v for k, v in CLEAN.items() if k not in ("CC", "CXX")}  # of make: conan knows no `cc`
    env["CONAN_HOME"] = f"{os.getcwd()}/home"
    sh("conan profile detect", env=env)
    for shared in ("False", "True"):
        out = sh(f"conan create {filled()}/recipes/conan/all --version {version()} -o '&:shared={shared}'"
                 " --no-remote -s build_type=Debug", env=env)
        check("rank 1 of 2: 2" in out, out)


# Functions of vcpkg as far as the port needs them. Those that clean up check what they clean up.
VCPKG = r"""
set(CURRENT_PACKAGES_DIR "${root}/package")
set(CURRENT_BUILDTREES_DIR "${root}/buildtrees")
set(PORT fsdp)
function(run)
    execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
    if(status)
        message(FATAL_ERROR "${ARGV}")
    endif()
endfunction()
function(vcpkg_download_distfile name)
    cmake_parse_arguments(arg "" "FILENAME;SHA512" "URLS" ${ARGN})
    file(DOWNLOAD "${arg_URLS}" "${root}/${arg_FILENAME}" EXPECTED_HASH SHA512=${arg_SHA512})
    set(${name} "${root}/${arg_FILENAME}" PARENT_SCOPE)
endfunction()
function(vcpkg_extract_source_archive name keyword archive)
    file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${root}/src")
    file(GLOB folder "${root}/src/*")
    set(${name} "${folder}" PARENT_SCOPE)
endfunction()
function(vcpkg_cmake_configure) # one build is taken for that of debug, too
    cmake_parse_arguments(arg "" "SOURCE_PATH" "OPTIONS" ${ARGN})
    run(${CMAKE_COMMAND} -S "${arg_SOURCE_PATH}" -B "${root}/build" ${arg_OPTIONS}
        -DBUILD_SHARED_LIBS=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_INSTALL_LIBDIR=lib)
    run(${CMAKE_COMMAND} --build "${root}/build" -- -j2)
endfunction()
function(vcpkg_cmake_install)
    foreach(prefix IN ITEMS "" /debug)
        run(${CMAKE_COMMAND} --install "${root}/build" --prefix "${CURRENT_PACKAGES_DIR}${prefix}")
    endforeach()
endfunction()
function(vcpkg_cmake_config_fixup)
    cmake_parse_arguments(arg "" "CONFIG_PATH" "" ${ARGN})
    file(RENAME "${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}" "${CURRENT_PACKAGES_DIR}/share/${PORT}")
    file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/${arg_CONFIG_PATH}"
         "${CURRENT_PACKAGES_DIR}/lib/cmake" "${CURRENT_PACKAGES_DIR}/debug/lib/cmake")
endfunction()
function(vcpkg_fixup_pkgconfig)
    file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/share/pkgconfig")
endfunction()
function(vcpkg_copy_tools)
    cmake_parse_arguments(arg "AUTO_CLEAN" "" "TOOL_NAMES" ${ARGN})
    foreach(tool IN LISTS arg_TOOL_NAMES)
        file(INSTALL "${CURRENT_PACKAGES_DIR}/bin/${tool}"
             DESTINATION "${CURRENT_PACKAGES_DIR}/tools/${PORT}" USE_SOURCE_PERMISSIONS)
        file(REMOVE "${CURRENT_PACKAGES_DIR}/bin/${tool}" "${CURRENT_PACKAGES_DIR}/debug/bin/${tool}")
    endforeach()
    foreach(bin IN ITEMS bin debug/bin) # AUTO_CLEAN removes them if nothing else is there
        file(GLOB left "${CURRENT_PACKAGES_DIR}/${bin}/*")
        if(left)
            message(FATAL_ERROR "tools that the port does not name: ${left}")
        endif()
        file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/${bin}")
    endforeach()
endfunction()
function(vcpkg_install_copyright)
    cmake_parse_arguments(arg "" "" "FILE_LIST" ${ARGN})
    file(INSTALL ${arg_FILE_LIST} DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
    file(RENAME "${CURRENT_PACKAGES_DIR}/share/${PORT}/LICENSE"
         "${CURRENT_PACKAGES_DIR}/share/${PORT}/copyright")
endfunction()
include("${port}/portfile.cmake")
"""


@needs("cmake")
def vcpkg():
    """The port with stand-ins for vcpkg's functions, and what its reviewers' checks look at."""
    port = f"{filled()}/recipes/vcpkg"
    with open("run.cmake", "w", encoding="utf-8") as f:
        f.write(VCPKG)
    sh(f"cmake -Droot={os.getcwd()} -Dport={port} -DVERSION={version()} -P run.cmake", env=CLEAN)
    files = {os.path.relpath(f, "package") for f in glob.glob("package/**", recursive=True)}
    for wanted in ("include/fsdp/fsdp.h", "lib/libfsdp.a", "debug/lib/libfsdp.a", "tools/fsdp/fsdprun",
                   "share/fsdp/fsdp-config.cmake", "share/fsdp/copyright", "share/fsdp/usage"):
        check(wanted in files, f"no {wanted}")
    empty = [f for f in files if os.path.isdir(f"package/{f}") and not os.listdir(f"package/{f}")]
    wrong = [f for f in files if f.startswith(("debug/include", "debug/share", "share/doc", "bin"))
             or f.endswith(".so")]
    check(not empty and not wrong, f"empty: {empty}; not in a static package: {wrong}")
    here = [f for f in files if os.path.isfile(f"package/{f}") and f.endswith((".pc", ".cmake"))
            and os.getcwd() in open(f"package/{f}", encoding="utf-8").read()]
    check(not here, f"absolute paths: {here}")


@needs("cmake")
def spack():
    """The recipe with stand-ins for Spack's directives: a package of each variant is configured."""
    seen = {}

    class CMakePackage:
        def define_from_variant(self, name, variant):
            check(variant in seen["variant"], f"no variant {variant}")
            return f"-D{name}={'ON' if self.on == variant else 'OFF'}"

    def directive(name):
        def noted(what=None, **options):
            seen.setdefault(name, {})[what] = options
        return noted

    names = {n: directive(n) for n in ("license", "version", "variant", "depends_on", "requires")}
    packages = {"spack_repo": {}, "spack_repo.builtin": {}, "spack_repo.builtin.build_systems": {},
                "spack_repo.builtin.build_systems.cmake": {"CMakePackage": CMakePackage}, "spack": {},
                "spack.package": names}
    for name, members in packages.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(members)
    recipe = {}
    with open(f"{filled()}/recipes/spack/package.py", encoding="utf-8") as f:
        exec(compile(f.read(), "package.py", "exec"), recipe)  # pylint: disable=exec-used
    with open(archive(), "rb") as f:
        check(seen["version"] == {version(): {"sha256": hashlib.sha256(f.read()).hexdigest()}}, str(seen))
    check(recipe["Fsdp"].url == f"file://{archive()}" and "MIT" in seen["license"], str(seen))
    for variant in seen["variant"]:
        package = recipe["Fsdp"]()
        package.on = variant
        out = sh(f"cmake -S {ROOT} -B {variant} {' '.join(package.cmake_args())}", env=CLEAN)
        check("not used by the project" not in out, out)  # an option that is none


if __name__ == "__main__":
    try:
        {f.__name__: f for f in (meson, conan, vcpkg, spack)}[sys.argv[1]]()
    except Skip as reason:
        print(reason)
        sys.exit(77)
