//! Where an endpoint can be reached: what a rank publishes about itself in the store.
//!
//! The bytes come from other processes, so they are parsed as hostile: one version byte, every length bounded,
//! nothing allocated beyond what the input itself holds, nothing left over at the end.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::error::{Code, Error, ForeignText, Result};
use crate::users;

const VERSION: u8 = 2;
/// More than any address needs; a longer one is refused unread.
const MAX_BYTES: usize = 1024;
const MAX_NAME: usize = 255;
/// The most bytes of a Unix socket's name, besides the leading zero.
const MAX_UNIX_NAME: usize = 107;
const MAX_TCP: usize = 16;

/// No user has this number.
const NO_USER: u32 = u32::MAX;

/// A host as far as sharing memory goes: one boot of one kernel, one network namespace and one user there, and the label
/// that the user gave to a part of it.
///
/// Two processes with equal `HostId` try shared memory. Containers in one network namespace are equal and find out by
/// trying.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostId {
    boot: [u8; 16],
    /// The effective user's number. Users of one host do not share memory. `NO_USER`: one that the user namespace does not
    /// know, who shares it with nobody.
    user: u32,
    label: Option<String>,
}

impl HostId {
    /// Whether both are of one boot of one kernel, whatever the user calls them.
    pub(super) fn is_same_machine(&self, other: &Self) -> bool {
        self.boot == other.boot
    }

    /// This host, with the user's label if there is one. Ranks with different labels do not share memory even when
    /// they could; that is how several hosts are imitated on one.
    ///
    /// # Errors
    /// `InvalidArgument` when the label is empty, too long or has control characters.
    pub fn this(label: Option<&str>) -> Result<Self> {
        let fits = |label: &&str| {
            (1..=MAX_NAME).contains(&label.len()) && !label.contains(char::is_control)
        };
        if let Some(label) = label.filter(|label| !fits(label)) {
            return Err(Error::invalid(format!(
                "host label {label:?} must have 1 to {MAX_NAME} bytes and no control characters"
            )));
        }
        Ok(Self {
            boot: match label {
                Some(_) => boot_id(),
                None => in_namespace(boot_id()),
            },
            user: users::own().unwrap_or(NO_USER),
            label: label.map(str::to_owned),
        })
    }
}

impl HostId {
    /// Whether a process there may share memory with one at `other`.
    pub(super) fn shares_memory_with(&self, other: &Self) -> bool {
        self == other && self.user != NO_USER
    }
}

/// The same for one network namespace of the host: the Unix sockets that hand memory over do not lead out of it, so a
/// container with a network of its own is another host. A user's label stands above that.
fn in_namespace(boot: [u8; 16]) -> [u8; 16] {
    let namespace = u128::from(network_namespace());
    (u128::from_be_bytes(boot) ^ namespace).to_be_bytes()
}

/// The number of this process's network namespace; 0 where the kernel does not tell.
pub(crate) fn network_namespace() -> u64 {
    let name = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let name = name.to_string_lossy();
    let digits = name.trim_matches(|letter: char| !letter.is_ascii_digit());
    digits.parse().unwrap_or(0)
}

/// Whether the system tells both of what makes a host without a label.
fn is_certain() -> bool {
    kernel_boot_id().is_some() && network_namespace() != 0
}

fn kernel_boot_id() -> Option<u128> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    u128::from_str_radix(&text.trim().replace('-', ""), 16).ok()
}

/// The kernel's boot id; where there is none (some sandboxes), the host name stands in: it can be wrong, and the
/// attempt to share memory then fails and TCP is used.
fn boot_id() -> [u8; 16] {
    match kernel_boot_id() {
        Some(id) => id.to_be_bytes(),
        None => {
            let mut id = [0; 16];
            for (at, byte) in hostname().bytes().enumerate() {
                id[at % 16] ^= byte;
            }
            id
        }
    }
}

/// This host's name, cut and cleaned so that it can be published.
pub(super) fn hostname() -> String {
    let uname = rustix::system::uname();
    let name = uname.nodename().to_string_lossy();
    name.chars()
        .filter(|letter| !letter.is_control())
        .take(MAX_NAME / 4)
        .collect()
}

/// Where an endpoint can be reached, and how to speak of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(super) host: HostId,
    pub(super) hostname: String,
    pub(super) pid: u32,
    /// Abstract name of the Unix socket, without the leading zero; empty when there is none.
    pub(super) unix_name: Vec<u8>,
    pub(super) tcp: Vec<SocketAddr>,
}

impl Address {
    /// The host it is on.
    pub fn host(&self) -> &HostId {
        &self.host
    }

    /// The host's name, for people.
    pub fn hostname(&self) -> &str {
        &self.hostname
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The TCP addresses it listens on.
    pub fn tcp(&self) -> &[SocketAddr] {
        &self.tcp
    }

    /// The addresses on loopback and those on the network.
    fn sides(&self) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
        let all = self.tcp.iter();
        all.partition(|address| address.ip().is_loopback())
    }

    /// Whether it listens on loopback and on the network.
    pub(super) fn has_both(&self) -> bool {
        let (inside, outside) = self.sides();
        !inside.is_empty() && !outside.is_empty()
    }

    /// Whether loopback leads from this process, whose address this is, to `other`. A label says nothing of that, and a host
    /// that is not known for sure is none. A running machine can be copied with all its marks; the copy has another address
    /// in the network.
    pub(super) fn shares_loopback_with(&self, other: &Self) -> bool {
        let outside = |address: &Self| {
            let mut ips: Vec<IpAddr> = address.sides().1.iter().map(SocketAddr::ip).collect();
            ips.sort_unstable();
            ips
        };
        let labels = [&self.host.label, &other.host.label];
        labels.iter().all(|label| label.is_none())
            && self.host.boot == other.host.boot
            && is_certain()
            && other.has_both()
            && outside(self) == outside(other)
    }

    /// The TCP addresses by which the process with the address `own` tries to reach this one, the best first. Loopback leads
    /// to the wrong host from any other, so it is tried only where there is nothing else.
    pub(super) fn towards(&self, own: &Self) -> Vec<SocketAddr> {
        let (mut inside, outside) = self.sides();
        if outside.is_empty() || inside.is_empty() {
            return self.tcp.clone();
        }
        if !own.shares_loopback_with(self) {
            return outside;
        }
        inside.extend(outside);
        inside
    }

    /// The bytes to publish.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend(self.host.boot);
        bytes.extend(self.host.user.to_le_bytes());
        put(
            &mut bytes,
            self.host.label.as_deref().unwrap_or("").as_bytes(),
        );
        put(&mut bytes, self.hostname.as_bytes());
        bytes.extend(self.pid.to_le_bytes());
        put(&mut bytes, &self.unix_name);
        bytes.push(self.tcp.len() as u8);
        for address in &self.tcp {
            match address.ip() {
                IpAddr::V4(ip) => put(&mut bytes, &ip.octets()),
                IpAddr::V6(ip) => put(&mut bytes, &ip.octets()),
            }
            bytes.extend(address.port().to_le_bytes());
        }
        bytes
    }

    /// Parses what another process published.
    ///
    /// # Errors
    /// `Untrusted` when the bytes are not an address, naming the field that is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        parse(bytes).map_err(|what| {
            Error::new(
                Code::Untrusted,
                format!(
                    "the published address of a rank ({} bytes) is not one: {what}",
                    bytes.len()
                ),
            )
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host.label.as_deref().unwrap_or(&self.hostname);
        write!(f, "host {host}, pid {}", self.pid)
    }
}

fn put(bytes: &mut Vec<u8>, field: &[u8]) {
    bytes.push(field.len() as u8);
    bytes.extend(field);
}

fn parse(bytes: &[u8]) -> Result<Address, &'static str> {
    if bytes.len() > MAX_BYTES {
        return Err("too long");
    }
    let mut rest = Reader(bytes);
    if rest.array::<1>()? != [VERSION] {
        return Err("another version of unisono wrote it");
    }
    let boot = rest.array()?;
    let user = u32::from_le_bytes(rest.array()?);
    let label = rest.name()?;
    let hostname = rest.name()?;
    let pid = u32::from_le_bytes(rest.array()?);
    let unix_name = rest.field()?.to_vec();
    if unix_name.len() > MAX_UNIX_NAME {
        return Err("the name of its Unix socket is too long");
    }
    let [count] = rest.array()?;
    if usize::from(count) > MAX_TCP {
        return Err("too many TCP addresses");
    }
    let tcp = (0..count)
        .map(|_| rest.socket())
        .collect::<Result<_, _>>()?;
    if !rest.0.is_empty() {
        return Err("bytes after its end");
    }
    let label = (!label.is_empty()).then_some(label);
    Ok(Address {
        host: HostId { boot, user, label },
        hostname,
        pid,
        unix_name,
        tcp,
    })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (head, tail) = self.0.split_at_checked(count).ok_or("cut short")?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn field(&mut self) -> Result<&'a [u8], &'static str> {
        let [length] = self.array()?;
        self.take(usize::from(length))
    }

    /// Text that will appear in logs and errors.
    fn name(&mut self) -> Result<String, &'static str> {
        let name = self.field()?;
        let shown: String = ForeignText::read(name).ok_or("a name is not UTF-8")?.into();
        match shown.as_bytes() == name {
            true => Ok(shown),
            false => Err("a name has characters that terminals obey"),
        }
    }

    fn socket(&mut self) -> Result<SocketAddr, &'static str> {
        let field = self.field()?;
        let ip: IpAddr = if let Ok(octets) = <[u8; 4]>::try_from(field) {
            Ipv4Addr::from(octets).into()
        } else if let Ok(octets) = <[u8; 16]>::try_from(field) {
            Ipv6Addr::from(octets).into()
        } else {
            return Err("an IP address is neither version 4 nor 6");
        };
        let port = u16::from_le_bytes(self.array()?);
        if port == 0 || ip.is_unspecified() || ip.is_multicast() {
            return Err("a TCP address that cannot be connected to");
        }
        Ok(SocketAddr::new(ip, port))
    }
}

#[cfg(test)]
impl Address {
    /// The addresses that fuzzing begins with.
    pub(crate) fn samples() -> [Self; 2] {
        let sample = |label: Option<&str>, unix_name: &[u8], tcp: &[&str]| Self {
            host: HostId {
                boot: [7; 16],
                user: 1000,
                label: label.map(str::to_owned),
            },
            hostname: "node7".into(),
            pid: 42,
            unix_name: unix_name.to_vec(),
            tcp: tcp
                .iter()
                .map(|text| text.parse().expect("an address"))
                .collect(),
        };
        [
            sample(None, b"unisono-42", &["10.0.0.7:4321", "[fd00::7]:4321"]),
            sample(Some("here"), b"", &[]),
        ]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ips() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[u8; 4]>().prop_map(|octets| IpAddr::from(Ipv4Addr::from(octets))),
            any::<[u8; 16]>().prop_map(|octets| IpAddr::from(Ipv6Addr::from(octets))),
        ]
        .prop_filter("can be connected to", |ip| {
            !ip.is_unspecified() && !ip.is_multicast()
        })
    }

    fn addresses() -> impl Strategy<Value = Address> {
        (
            (
                any::<[u8; 16]>(),
                any::<u32>(),
                prop::option::of("[a-zA-Z0-9.ä -]{1,60}"),
            ),
            "[a-z0-9.-]{0,63}",
            any::<u32>(),
            prop::collection::vec(any::<u8>(), 0..=MAX_UNIX_NAME),
            prop::collection::vec((ips(), 1..=u16::MAX), 0..=MAX_TCP),
        )
            .prop_map(
                |((boot, user, label), hostname, pid, unix_name, tcp)| Address {
                    host: HostId { boot, user, label },
                    hostname,
                    pid,
                    unix_name,
                    tcp: tcp.into_iter().map(SocketAddr::from).collect(),
                },
            )
    }

    proptest! {
        #[test]
        fn survives_the_round_trip(address in addresses()) {
            prop_assert_eq!(Address::from_bytes(&address.to_bytes()), Ok(address));
        }

        #[test]
        fn every_prefix_is_refused(address in addresses(), at in any::<prop::sample::Index>()) {
            let bytes = address.to_bytes();
            let cut = &bytes[..at.index(bytes.len())];
            prop_assert_eq!(Address::from_bytes(cut).unwrap_err().code, Code::Untrusted);
        }

        /// Changed bytes are refused or read as an address that writes the same bytes.
        #[test]
        fn parsing_is_exact(
            address in addresses(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            tail in prop::collection::vec(any::<u8>(), 0..3),
        ) {
            let mut bytes = address.to_bytes();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.extend(tail);
            if let Ok(parsed) = Address::from_bytes(&bytes) {
                prop_assert_eq!(parsed.to_bytes(), bytes);
            }
        }

        #[test]
        fn garbage_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            if let Ok(parsed) = Address::from_bytes(&bytes) {
                prop_assert_eq!(parsed.to_bytes(), bytes);
            }
        }
    }

    #[test]
    fn a_label_sets_a_host_apart() {
        let plain = HostId::this(None).unwrap();
        assert_eq!(plain, HostId::this(None).unwrap());
        let left = HostId::this(Some("left")).unwrap();
        assert_eq!(left, HostId::this(Some("left")).unwrap());
        assert_ne!(left, plain);
        for label in ["", "a\nb", &"x".repeat(256)] {
            assert_eq!(
                HostId::this(Some(label)).unwrap_err().code,
                Code::InvalidArgument
            );
        }
    }

    #[test]
    fn speaks_of_host_and_process() {
        let address = Address {
            host: HostId::this(None).unwrap(),
            hostname: "node7".into(),
            pid: 42,
            unix_name: Vec::new(),
            tcp: Vec::new(),
        };
        assert_eq!(address.to_string(), "host node7, pid 42");
    }
}
