# Sourced by build_lto.sh and build_pgo.sh in the repository's root: a copy of the sources to build from, so that the checkout's own
# build stays as it is. Both builds of a profile need the same paths, therefore one copy serves all of a script's builds.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# install_copy FOLDER: compiles and installs into the folder, without dependencies. CFLAGS and LLAMAC_* as the caller set them.
install_copy() {
    rm -rf "$work/source" "$1"
    mkdir "$work/source"
    tar -c --exclude ./build --exclude '*.so' --exclude ./.git --exclude '*_cache' . | tar -x -C "$work/source"
    (cd "$work/source" && "${PYTHON:-python}" -m pip install -q --no-deps --no-build-isolation --target "$1" .)
}
