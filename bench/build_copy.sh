# Sourced by build_lto.sh and build_pgo.sh in the repository's root. Builds from a copy of the sources, so that the
# checkout's own build stays untouched. A script uses one copy for all its builds: profiles require equal paths.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# install_copy FOLDER: compiles and installs llamac into the folder, without dependencies. Honors CFLAGS and LLAMAC_*.
install_copy() {
    rm -rf "$work/source" "$1"
    mkdir "$work/source"
    tar -c --exclude ./build --exclude '*.so' --exclude ./.git --exclude '*_cache' . | tar -x -C "$work/source"
    (cd "$work/source" && "${PYTHON:-python}" -m pip install -q --no-deps --no-build-isolation --target "$1" .)
}
