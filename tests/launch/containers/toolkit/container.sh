#!/bin/sh
# Run a command as if in a container of SageMaker:  container.sh ROOT HOST COMMAND...
#
# ROOT appears as /opt/ml and HOST resolves to this machine. Where no sshd is installed, a stand-in
# takes its place: the toolkit starts one even for a single host, and nobody talks to it.
# To be run in mount and process namespaces of its own (unshare), so that nothing is left behind.
set -eu
root=$1
host=$2
shift 2

# What is written to a folder from here on goes to memory.
stage=$(mktemp -d)
mount -t tmpfs tmpfs "$stage"
shadow() {
    name=$(echo "$1" | tr / _)
    mkdir "$stage/$name" "$stage/$name.work"
    mount -t overlay overlay -o "lowerdir=$1,upperdir=$stage/$name,workdir=$stage/$name.work" "$1"
}

shadow /opt
mkdir -p /opt/ml
mount --bind "$root" /opt/ml

{ cat /etc/hosts; echo "127.0.0.1 $host"; } > "$stage/hosts"
mount --bind "$stage/hosts" /etc/hosts

if [ ! -e /usr/sbin/sshd ]; then
    shadow /usr/sbin
    printf '#!/bin/sh\nexec sleep 600\n' > /usr/sbin/sshd
    chmod +x /usr/sbin/sshd
fi

exec "$@"
