//! The table holds together, and whatever a user writes is taken or refused by name.

use std::ffi::OsString;
use std::time::Duration;

use proptest::prelude::*;

use super::environment::PREFIX;
use super::*;
use crate::error::Code;

fn from(variables: &[(&str, &str)]) -> Result<Config> {
    Config::from_variables(
        variables
            .iter()
            .map(|(name, value)| (OsString::from(name), OsString::from(value))),
    )
}

#[test]
fn the_table_is_small_and_consistent() {
    assert!(TABLE.len() <= 20);
    let config = Config::default();
    for row in Config::table() {
        assert_eq!(row.variable, format!("{PREFIX}{}", row.name.to_uppercase()));
        assert!(!row.consequence.contains('\n'));
        // A shown value can be set again, and the default is the one in the row.
        let shown = config.value(row.name).expect("every row has a field");
        let mut again = Config::default();
        again.set(row.name, &shown).expect("a shown value parses");
        again
            .set(row.name, row.default)
            .expect("the default parses");
        assert_eq!(again, config, "{}", row.name);
    }
}

#[test]
fn every_algorithm_is_offered() {
    let row = TABLE
        .iter()
        .find(|row| row.name == "algorithm")
        .expect("a row");
    for algorithm in Algorithm::ALL {
        assert!(row.accepts.contains(algorithm.name()), "{algorithm:?}");
        let config = from(&[("UNISONO_ALGORITHM", algorithm.name())]).expect("parses");
        assert_eq!(config.algorithm, Some(algorithm));
    }
}

#[test]
fn the_environment_is_read() {
    let config = from(&[
        ("UNISONO_TIMEOUT", "2.5"),
        ("UNISONO_JOIN_TIMEOUT", "none"),
        ("UNISONO_RING_BYTES", "1M"),
        ("UNISONO_HOST", "left"),
        ("UNISONO_TRANSPORT", "tcp"),
        ("UNISONO_TORCH_DIR", "/somewhere"),
        ("UNISONO_TEST_ANYTHING", "1"),
        ("PATH", "/bin"),
    ])
    .expect("valid");
    assert_eq!(config.timeout.duration(), Duration::from_millis(2500));
    assert_eq!(config.join_timeout, Timeout(None));
    assert_eq!(config.ring_bytes.bytes(), 1 << 20);
    assert_eq!(config.host.as_deref(), Some("left"));
    assert_eq!(config.transport, TransportChoice::Tcp);
}

#[test]
fn unknown_names_are_answered_with_the_nearest() {
    let error = from(&[("UNISONO_TIMOUT", "3")]).expect_err("unknown");
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(
        error.message.contains("did you mean UNISONO_TIMEOUT?"),
        "{error}"
    );
    let error = Config::default()
        .set("ring_byte", "4096")
        .expect_err("unknown");
    assert!(
        error.message.contains("did you mean ring_bytes?"),
        "{error}"
    );
}

#[test]
fn what_tells_of_an_installation_is_no_setting() {
    for word in [
        "ROOT", "DIR", "HOME", "PATH", "PREFIX", "VERSION", "LIB", "INCLUDE",
    ] {
        let variable = format!("UNISONO_{word}");
        assert!(TABLE.iter().all(|row| row.variable != variable));
        let config = from(&[(&*variable, "/opt/unisono"), ("UNISONO_TIMEOUT", "3")]);
        assert_eq!(
            config.expect("passes").timeout.duration(),
            Duration::from_secs(3)
        );
    }
    // A slip that would leave a job without its secret is one still.
    for slip in [
        "UNISONO_SECRET_PATH",
        "UNISONO_HOSTS",
        "UNISONO_INSTALL_TIMEOUT",
        "UNISONO_",
    ] {
        from(&[(slip, "1")]).expect_err("a slip");
    }
}

#[test]
fn what_kubernetes_makes_of_a_service_is_no_setting() {
    let links = [
        "UNISONO_PORT",
        "UNISONO_SERVICE_HOST",
        "UNISONO_JOB_SERVICE_PORT",
        "UNISONO_JOB_SERVICE_PORT_STORE",
        "UNISONO_JOB_PORT_29500_TCP",
        "UNISONO_JOB_PORT_29500_TCP_ADDR",
    ];
    for link in links {
        let set = [(link, "10.0.0.1"), ("KUBERNETES_SERVICE_HOST", "10.0.0.2")];
        from(&set).expect("in a pod");
        from(&set[..1]).expect_err("elsewhere");
    }
    for slip in ["UNISONO_TIMOUT", "UNISONO_PORT_TCP", "UNISONO_IMPORTANT"] {
        let set = [(slip, "1"), ("KUBERNETES_SERVICE_HOST", "10.0.0.2")];
        from(&set).expect_err("a slip");
    }
}

#[test]
fn values_out_of_range_are_refused_and_change_nothing() {
    let mut config = Config::default();
    for (name, value) in [
        ("timeout", "0"),
        ("timeout", "-1"),
        ("timeout", "nan"),
        ("timeout", "inf"),
        ("timeout", "soon"),
        ("peer_timeout", "1"),
        ("peer_timeout", "3601"),
        ("peer_timeout", "2.5"),
        ("ring_bytes", "5000"),
        ("ring_bytes", "2048"),
        ("ring_bytes", "128M"),
        ("eager_bytes", "99999999999999999999G"),
        ("transport", "udp"),
        ("algorithm", "magic"),
        ("flight_records", "-1"),
        ("host", ""),
    ] {
        let error = config.set(name, value).expect_err("out of range");
        assert!(
            error.message.contains(name) && error.message.contains("takes"),
            "{error}"
        );
    }
    assert_eq!(config, Config::default());
}

#[test]
fn the_digest_covers_what_must_agree_and_nothing_else() {
    let base = Config::default();
    for row in TABLE {
        let mut other = base.clone();
        let value = match row.name {
            "transport" => "tcp",
            "algorithm" => "ring",
            "ring_bytes" => "4K",
            "log" => "off",
            "device_failure" => "raise",
            "threads" => "3",
            "encrypt" => "on",
            _ => "77",
        };
        other.set(row.name, value).expect("valid");
        assert_eq!(
            other.digest() != base.digest(),
            row.must_agree,
            "{}",
            row.name
        );
    }
}

proptest! {
    #[test]
    fn no_text_panics(index in 0..TABLE.len(), text in ".{0,40}") {
        let _ = Config::default().set(TABLE[index].name, &text);
    }

    #[test]
    fn sizes_keep_their_value(bytes in any::<u32>()) {
        prop_assert_eq!(Bytes::parse(&Bytes(bytes as usize).show()), Some(Bytes(bytes as usize)));
    }
}
