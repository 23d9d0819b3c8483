use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::thread;

use super::*;
use crate::rendezvous::launcher::Master;
use crate::temporary::Temporary;

const SOON: Duration = Duration::from_secs(10);

fn config(seconds: &str) -> Config {
    let mut config = Config::default();
    config.set("join_timeout", seconds).expect("seconds");
    config
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    listener.local_addr().expect("address").port()
}

/// The store of `meeting` ends without further doing.
fn assert_closes(meeting: &Meeting) {
    let Opened::Tcp(store) = &meeting.opened else {
        panic!("served over TCP");
    };
    let begun = Instant::now();
    while !store.server().expect("served here").has_ended() {
        assert!(begun.elapsed() < SOON, "the store is still open");
        thread::sleep(Duration::from_millis(2));
    }
    // A process that another test is starting may have the socket for a moment.
    let refused = loop {
        match TcpStream::connect(store.address()) {
            Ok(_) => assert!(begun.elapsed() < SOON, "the port is still open"),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

/// All ranks see what the others set, and the store closes when all are done.
fn meet(open: impl Fn(Rank) -> Result<Meeting> + Sync) {
    thread::scope(|scope| {
        let open = &open;
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    let meeting = open(rank).expect("open");
                    let store = meeting.store();
                    store.set(&format!("{rank}"), b"here").expect("set");
                    for other in 0..3 {
                        store.wait(&format!("{other}"), SOON).expect("came");
                    }
                    let rest = meeting.joined();
                    if let Some(rest) = rest {
                        // Rank 0 serves, until the others are done.
                        assert_eq!(rank, 0);
                        assert_closes(&rest);
                    }
                })
            })
            .collect();
        for rank in ranks {
            rank.join().expect("no panic");
        }
    });
}

#[test]
fn ranks_meet_at_a_tcp_url() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    meet(|rank| open_url(&url, rank, 3, &config("10")));
    let url = format!("tcp://localhost:{}/", free_port());
    meet(|rank| open_url(&url, rank, 3, &config("10")));
}

#[test]
fn ranks_meet_in_a_file() {
    let path = Temporary::new();
    let url = format!("file://{}", path.0.display());
    meet(|rank| open_url(&url, rank, 3, &config("10")));
}

#[test]
fn ranks_meet_beside_the_launcher_s_own_server() {
    let agent = TcpListener::bind("127.0.0.1:0").expect("bind");
    let launch = |rank| Launch {
        rank,
        world: 3,
        local_rank: None,
        local_world: None,
        master: Some(Master {
            host: "127.0.0.1".to_owned(),
            port: agent.local_addr().expect("address").port(),
            is_taken: true,
        }),
        job: "torchrun some-id 1".to_owned(),
        secret: Some(Secret::from_bytes(b"of the launcher")),
        source: "torchrun",
    };
    meet(|rank| open_launch(&launch(rank), &config("10"), &|| Ok(())));
    let mut alone = launch(0);
    (alone.world, alone.master) = (1, None);
    open_launch(&alone, &config("10"), &|| Ok(())).expect("needs no meeting");
}

#[test]
fn ranks_of_one_host_meet_on_loopback_whatever_the_master_is_called() {
    let port = free_port();
    let launch = |rank| Launch {
        rank,
        world: 3,
        local_rank: None,
        local_world: Some(3),
        master: Some(Master {
            // For documentation: no host has it.
            host: "192.0.2.1".to_owned(),
            port,
            is_taken: false,
        }),
        job: "the same".to_owned(),
        secret: None,
        source: "torchrun",
    };
    meet(|rank| {
        let meeting = open_launch(&launch(rank), &config("10"), &|| Ok(()))?;
        let address = meeting.store().address().expect("over TCP");
        assert!(address.ip().is_loopback(), "{address}");
        Ok(meeting)
    });
    let alone =
        open_launch(&launch(1), &config("0.1"), &|| Ok(())).expect_err("rank 0 does not come");
    let why =
        "torchrun says that all 3 ranks are on this host, so they meet here and not at 192.0.2.1";
    assert!(alone.message.ends_with(why), "{alone}");
}

#[test]
fn rank_0_leaves_after_all_ranks_that_came() {
    let store = MemoryStore::default();
    // Rank 1 came and is slow to leave; rank 2 never came and is not waited for.
    store.set(&roster::entry_key(1), b"").expect("set");
    let begun = Instant::now();
    thread::scope(|scope| {
        let zero = scope.spawn(|| {
            leave(&store, 0, 3, SOON);
            begun.elapsed()
        });
        thread::sleep(Duration::from_millis(50));
        leave(&store, 1, 3, SOON);
        let took = zero.join().expect("no panic");
        assert!(took >= Duration::from_millis(40) && took < SOON, "{took:?}");
    });
    let begun = Instant::now();
    store.set(&roster::entry_key(2), b"").expect("set");
    leave(&store, 0, 3, Duration::from_millis(30));
    assert!(begun.elapsed() >= Duration::from_millis(30));
}

#[test]
fn other_urls_are_refused_with_what_is_accepted() {
    for url in [
        "",
        "node0:29500",
        "http://a:1",
        "tcp://a",
        "tcp://a:0",
        "tcp://fd00::1:2",
        "file://x",
    ] {
        let Err(error) = open_url(url, 0, 2, &config("10")) else {
            panic!("{url} was opened");
        };
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(
            error.message.contains("accepted are tcp://host:port"),
            "{error}"
        );
    }
    assert!(open_url("tcp://127.0.0.1:1", 2, 2, &config("10")).is_err());
}

#[test]
fn a_taken_port_is_said() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
    let url = format!("tcp://{}", taken.local_addr().expect("address"));
    let Err(error) = open_url(&url, 0, 2, &config("10")) else {
        panic!("the port was taken");
    };
    assert_eq!(error.code, Code::System);
    assert!(error.message.contains("choose another port"), "{error}");
}

#[test]
fn a_store_closes_when_the_time_to_join_is_over() {
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let meeting = open_url(&url, 0, 2, &config("0.1")).expect("open");
    let other = open_url(&url, 1, 2, &config("10")).expect("open");
    // Rank 1 neither joins nor leaves.
    let rest = meeting.joined().expect("served here");
    assert_closes(&rest);
    drop(other);
}

#[test]
fn only_ranks_with_the_same_secrets_meet() {
    let launch = |rank, secret: &str, port| Launch {
        rank,
        world: 2,
        local_rank: None,
        local_world: None,
        master: Some(Master {
            host: "127.0.0.1".to_owned(),
            port,
            is_taken: false,
        }),
        job: "the same".to_owned(),
        secret: (!secret.is_empty()).then(|| Secret::from_bytes(secret.as_bytes())),
        source: "torchrun",
    };
    let port = free_port();
    let first = open_launch(&launch(0, "one", port), &config("10"), &|| Ok(())).expect("open");
    for secret in ["two", ""] {
        let error =
            open_launch(&launch(1, secret, port), &config("1"), &|| Ok(())).expect_err("kept out");
        assert_eq!(error.code, Code::Timeout);
        assert!(error.message.contains("another secret"), "{error}");
    }
    // Two jobs that are launched at one port do not mix: the second takes the next.
    let second = open_launch(&launch(0, "two", port), &config("10"), &|| Ok(())).expect("open");
    for (secret, meeting) in [("one", &first), ("two", &second)] {
        let member =
            open_launch(&launch(1, secret, port), &config("10"), &|| Ok(())).expect("open");
        assert_eq!(member.store().address(), meeting.store().address());
        assert_eq!(
            member.store().secret(),
            Some(Secret::from_bytes(secret.as_bytes()))
        );
    }
}
