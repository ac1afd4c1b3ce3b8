# Shared by the scripts: messages, the packages and the Python environment they need.
# shellcheck shell=bash disable=SC2034
# Source it from a bash script in strict mode; it moves to the repository's root.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
REPOSITORY=$PWD
WORK=$REPOSITORY/.work
# What takes minutes to make and is the same for all clones of a user.
CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/gpuhook
mkdir -p "$WORK"

# What needs which Debian package: the command (or absolute path) that shows it is there.
PACKAGES_LINT=(shellcheck=shellcheck)
PACKAGES_BUILD=(gcc=gcc /usr/include/stdio.h=libc6-dev musl-gcc=musl-tools)
# From Debian 13 on, the docker command is a package of its own.
PACKAGES_DOCKER=(
    runc=runc dockerd=docker.io 'docker=docker-cli|docker.io' containerd=containerd
    busybox=busybox-static unshare=util-linux mount=mount
)
PACKAGES_ENGINES=(
    "${PACKAGES_DOCKER[@]}" crun=crun ctr=containerd podman=podman conmon=conmon
    debootstrap=debootstrap musl-gcc=musl-tools strace=strace pivot_root=util-linux-extra
    kubectl=kubernetes-client mke2fs=e2fsprogs node=nodejs lxc-start=lxc
)
PACKAGES_DEBIAN=(
    lintian=lintian rpmbuild=rpm mandoc=mandoc fish=fish deb-systemd-helper=init-system-helpers systemd-analyze=systemd
    /usr/lib/python3/dist-packages/click=python3-click
    /usr/lib/python3/dist-packages/google/protobuf=python3-protobuf
    /usr/lib/python3/dist-packages/grpc=python3-grpcio
    /usr/lib/python3/dist-packages/prometheus_client=python3-prometheus-client
    /usr/lib/python3/dist-packages/pyroute2=python3-pyroute2
    /usr/lib/python3/dist-packages/rich=python3-rich
    /usr/lib/python3/dist-packages/toml=python3-toml
    /usr/lib/python3/dist-packages/tomlkit=python3-tomlkit
    /usr/lib/python3/dist-packages/yaml=python3-yaml
)

PACKAGES_SLURM=(
    slurmctld=slurmctld slurmd=slurmd srun=slurm-client munged=munge ip=iproute2 setpriv=util-linux
    fusermount3=fuse3
)

say() {
    printf '\n== %s\n' "$*"
}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

is_root() {
    [[ $(id -u) -eq 0 ]]
}

is_there() {
    case $1 in
    /*) [[ -e $1 ]] ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

# install_packages PROOF=PACKAGE...: install the packages whose proof is missing, and say so.
# Of PACKAGE|OTHER it is the first that this Debian has.
install_packages() {
    local pair missing=()
    for pair in "$@"; do
        is_there "${pair%%=*}" || missing+=("${pair#*=}")
    done
    [[ ${#missing[@]} -gt 0 ]] || return 0
    is_root || die "missing packages: as root, run apt-get install ${missing[*]}"
    command -v apt-get >/dev/null || die "install these Debian packages' like: ${missing[*]}"
    # Another clone may be at it, and apt-get itself doesn't wait for all of its locks.
    flock --close /var/cache/apt apt-get update -q >/dev/null
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | first_known | sort -u)
    say "installing with apt: ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive flock --close /var/cache/apt \
        apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=600 \
        "${missing[@]}" >"$WORK/apt.log" 2>&1 || {
        tail -n 20 "$WORK/apt.log" >&2
        die "apt-get failed; all it said is in $WORK/apt.log"
    }
}

# Print, of each line of alternatives PACKAGE|OTHER, the first that apt knows, or else the last.
first_known() {
    local package rest
    while IFS='|' read -r package rest; do
        while [[ -n $rest ]] && ! apt-cache show --quiet=2 "$package" >/dev/null 2>&1; do
            IFS='|' read -r package rest <<<"$rest"
        done
        printf '%s\n' "$package"
    done
}

# work_folder NAME: print a new folder of root's for what a script makes outside of .work/. It is
# where device nodes work and programs run, which Debian 13's /tmp and a hardened one don't offer,
# and its path is short, because a socket's has 107 bytes at most.
work_folder() {
    local parent
    for parent in "${TMPDIR:-/tmp}" /var/tmp /run; do
        if [[ -d $parent && -w $parent &&
            ,$(findmnt --noheadings --output OPTIONS --target "$parent"), != *,@(nodev|noexec),* ]]; then
            mktemp -d "$parent/$1.XXXXXX"
            return
        fi
    done
    die "no folder for $1: ${TMPDIR:-/tmp}, /var/tmp and /run are mounted nodev or noexec"
}

# install_into ROOT LOG PACKAGE...: install packages into the root filesystem of a Debian.
install_into() {
    local root=$1 log=$2
    shift 2
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
    # The mirror may be a snapshot, too old for apt and not for debootstrap.
    echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/snapshot"
    chroot "$root" env DEBIAN_FRONTEND=noninteractive sh -c '
        apt-get update -q && apt-get install -y -q --no-install-recommends "$@"
    ' sh "$@" >"$log" 2>&1 </dev/null || {
        tail -n 5 "$log" >&2
        die "apt-get failed in $root; all it said is in $log"
    }
}

# Print the address of the Debian mirror that apt uses here.
debian_mirror() {
    local address
    # shellcheck disable=SC2016  # apt-get puts the address there
    address=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' |
        sed -n 1p)
    [[ -n $address ]] || die 'apt knows no Debian mirror here: run apt-get update'
    printf '%s\n' "$address"
}

# apt_apart_begin FOLDER SUITE...: make in a folder what apt needs to download packages of releases
# as if nothing were installed, so that libraries come too.
apt_apart_begin() {
    local folder=$1 mirror suite keys=/usr/share/keyrings/debian-archive-keyring.gpg
    shift
    mirror=$(debian_mirror)
    mkdir -p "$folder"/{lists,cache/archives}/partial
    : >"$folder/status"
    for suite in "$@"; do
        printf 'deb [signed-by=%s] %s %s main\n' "$keys" "$mirror" "$suite" >>"$folder/sources"
    done
}

# apt_apart FOLDER ARGUMENT...: run apt-get there; nothing on this machine changes.
apt_apart() {
    local folder=$1
    shift
    apt-get -q -y -o Dir::Etc::SourceList="$folder/sources" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$folder/lists" -o Dir::State::Status="$folder/status" \
        -o Dir::Cache="$folder/cache" -o APT::Sandbox::User= -o Acquire::Languages=none \
        -o APT::Install-Recommends=false "$@"
}

# slim ROOT: remove from a root filesystem that is kept what no test looks at.
slim() {
    rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/var/log/* \
        "$1"/usr/share/{doc,man,info,locale,zoneinfo}
}

# A Debian python3 without python3-venv has the module venv, but nothing to make pip from.
install_python() {
    if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
        install_packages /nonexistent=python3-venv
    fi
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$(python3 --version) is too old: 3.11 or newer is needed"
}

# debian_architecture MACHINE: print Debian's name of a machine (uname -m), this one's for none.
debian_architecture() {
    case $1 in
    '') dpkg --print-architecture ;;
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    *) die "there are no packages for $1" ;;
    esac
}

# The launcher is compiled where gpuhook is installed from source. Without root, it is with what is
# there: pip says what is missing.
install_compiler() {
    ! is_root || install_packages "${PACKAGES_BUILD[@]}"
}

# Tell whether .venv has all that is needed, and this tree's launcher.
has_tools() {
    [[ -x .venv/bin/ruff && ! launchers/launcher.c -nt .venv/bin/gpu-py ]] && .venv/bin/python - 2>/dev/null <<'PYTHON'
import bcrypt, celpy, click, grpc, hypothesis, kubernetes, material, mkdocs, mypy, prometheus_client, pynvml, pyroute2, pytest
import rich, toml
import gpuhook, gpuhook_simulate
PYTHON
}

# Make .venv: the developers' environment, with both packages installed as they lie here.
make_environment() {
    has_tools && return 0
    install_python
    install_compiler
    [[ -x .venv/bin/python ]] || {
        say 'making .venv'
        python3 -m venv .venv
    }
    say "installing gpuhook and the test tools into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --editable '.[test]' --editable simulate
}
