#!/usr/bin/perl
# dlprobe for Debian roots of any release, whose perl is linked with their own C library:
# dlopen each name given and print "NAME PATH DEVICE:INODE", or "NAME - the linker's message".
use strict;
use warnings;
use Cwd;
use DynaLoader;

sub mapped {
    open(my $maps, '<', '/proc/self/maps') or die;
    my %files;
    while (<$maps>) {
        $files{$1} = 1 if m{ (/\S+)$};
    }
    return %files;
}

# Of the files that came with a library, its own is the one that its name leads to beside it.
sub leads_to {
    my ($name, $path) = @_;
    my ($folder) = $path =~ m{^(.*)/};
    my @there = stat("$folder/$name") or return 0;
    my @here = stat($path) or return 0;
    return $there[0] == $here[0] && $there[1] == $here[1];
}

my $missing = 0;
for my $name (@ARGV) {
    my $child = fork() // die;
    if ($child) {
        waitpid($child, 0);
        $missing = 1 if $?;
        next;
    }
    my %before = mapped();
    my $handle = DynaLoader::dl_load_file($name, 0);
    if (!$handle) {
        print "$name - ", DynaLoader::dl_error(), "\n";
        exit 1;
    }
    my %after = mapped();
    my ($path) = grep { leads_to($name, $_) } grep { !$before{$_} } sort keys %after;
    ($path) = grep { leads_to($name, $_) } sort keys %after if !$path;
    my @status = stat($path);
    print "$name $path $status[0]:$status[1]\n";
    exit 0;
}
exit $missing;
