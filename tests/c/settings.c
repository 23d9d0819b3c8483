/* Settings, the log, errors, version: what needs no other rank. */
#include "check.h"

struct heard {
  int lines, debugs;
  char last[1000];
};

static void hear(void* context, unisono_log_level level, const char* message) {
  struct heard* heard = context;
  heard->lines++;
  heard->debugs += level == UNISONO_LOG_DEBUG;
  snprintf(heard->last, sizeof heard->last, "%s", message);
}

static void table(void) {
  unisono_config* config = NULL;
  const char* value = NULL;
  OK(unisono_config_create(&config));
  const size_t count = unisono_setting_count();
  CHECK(count > 10 && count < 25);
  int must_agree = 0;
  for (size_t at = 0; at < count; at++) {
    unisono_setting setting = UNISONO_SETTING_INIT;
    OK(unisono_setting_at(at, &setting));
    CHECK(setting.size == sizeof setting && strncmp(setting.variable, "UNISONO_", 8) == 0);
    CHECK(strlen(setting.consequence) > 20 && strlen(setting.accepts) > 2);
    OK(unisono_config_value(config, setting.name, &value));
    OK(unisono_config_set(config, setting.name, setting.initial));
    must_agree += setting.must_agree;
  }
  CHECK(must_agree > 2);
  unisono_setting setting = UNISONO_SETTING_INIT;
  FAILS(unisono_setting_at(count, &setting), UNISONO_INVALID_ARGUMENT, "no setting");
  setting.size = 3;
  FAILS(unisono_setting_at(0, &setting), UNISONO_INVALID_ARGUMENT, "_INIT");
  CHECK(setting.name == NULL);

  OK(unisono_config_value(config, "ring_bytes", &value));
  CHECK(strcmp(value, "262144") == 0);
  OK(unisono_config_set(config, "ring_bytes", "64K"));
  OK(unisono_config_value(config, "ring_bytes", &value));
  CHECK(strcmp(value, "65536") == 0);
  FAILS(unisono_config_set(config, "timeuot", "3"), UNISONO_INVALID_ARGUMENT, "timeout");
  FAILS(unisono_config_set(config, "timeout", "soon"), UNISONO_INVALID_ARGUMENT, "seconds");
  FAILS(unisono_config_set(config, NULL, "3"), UNISONO_INVALID_ARGUMENT, "name");
  FAILS(unisono_config_set(config, "timeout", NULL), UNISONO_INVALID_ARGUMENT, "value");
  FAILS(unisono_config_value(config, "tiemout", &value), UNISONO_INVALID_ARGUMENT, "timeout");
  FAILS(unisono_config_value(config, "timeout", NULL), UNISONO_INVALID_ARGUMENT, "value");

  /* A communicator is made with them, and no longer needs the config. */
  unisono_communicator* comm = NULL;
  OK(unisono_config_set(config, "timeout", "0.05"));
  OK(unisono_communicator_from_environment(config, &comm));
  OK(unisono_config_destroy(config));
  float x = 0;
  unisono_error error = UNISONO_ERROR_INIT;
  FAILS(unisono_recv(comm, &x, 1, UNISONO_FLOAT32, 0, 0, NULL, NULL), UNISONO_TIMEOUT, "after 0.");
  OK(unisono_last_error(&error));
  CHECK(error.fatal == 1);
  OK(unisono_communicator_destroy(comm));
}

static void errors(void) {
  unisono_error error = UNISONO_ERROR_INIT;
  FAILS(unisono_work_wait(NULL, 1), UNISONO_INVALID_ARGUMENT, "a work");
  OK(unisono_last_error(&error));
  CHECK(error.size == sizeof error && error.peer == -1 && !error.fatal && !error.operation);
  error.size = 4;
  FAILS(unisono_last_error(&error), UNISONO_INVALID_ARGUMENT, "_INIT");
  FAILS(unisono_last_error(NULL), UNISONO_INVALID_ARGUMENT, "NULL");
  CHECK(strcmp(unisono_status_name(UNISONO_OK), "UNISONO_OK") == 0);
  CHECK(strcmp(unisono_status_name(UNISONO_INTERNAL), "UNISONO_INTERNAL") == 0);
  CHECK(strcmp(unisono_status_name((unisono_status)99), "unknown status") == 0);
}

static void the_log(void) {
  struct heard first = {0, 0, ""}, second = {0, 0, ""};
  unisono_communicator* comm = NULL;
  FAILS(unisono_log_set(hear, &first, (unisono_log_level)5), UNISONO_INVALID_ARGUMENT, "5");
  OK(unisono_log_set(hear, &first, UNISONO_LOG_DEBUG));
  OK(unisono_communicator_from_environment(NULL, &comm));
  CHECK(first.lines > 0 && first.debugs <= first.lines && strlen(first.last) > 5);
  OK(unisono_log_set(hear, &second, UNISONO_LOG_OFF));
  const int before = first.lines;
  OK(unisono_communicator_destroy(comm));
  OK(unisono_communicator_from_environment(NULL, &comm));
  CHECK(first.lines == before && second.lines == 0);
  OK(unisono_log_set(NULL, NULL, UNISONO_LOG_WARN));
  OK(unisono_communicator_destroy(comm));
}

int main(void) {
  check_rank = environment_number("RANK");
  CHECK(unisono_last_error_message()[0] == 0);
  in("errors");
  errors();
  in("the log");
  the_log();
  in("the table");
  table();
  return 0;
}
