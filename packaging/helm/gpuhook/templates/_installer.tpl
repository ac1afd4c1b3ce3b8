{{/* Whether engines are restarted, and so need a lease: "true" or nothing. */}}
{{- define "gpuhook.restarts" -}}
{{- if and (has .Values.mode (list "runtime" "environment" "remove")) (ne .Values.installer.restart "none") }}true{{ end }}
{{- end }}

{{- define "gpuhook.installer" -}}
{{- $unit := include "gpuhook.unit" . }}
{{- $remove := eq .Values.mode "remove" }}
{{- $engine := has .Values.mode (list "runtime" "environment" "remove") }}
{{- $outside := or $unit $remove (include "gpuhook.restarts" .) }}
{{- $place := get (include "gpuhook.places" . | fromYaml) .Values.installer.distribution | default dict }}
{{- $usual := get $place "folder" | default (printf "/etc/%s" .Values.installer.engine) }}
{{- $folder := .Values.installer.engineFolder | default $usual }}
{{- $tasks := printf "%s/io.containerd.runtime.v2.task" (get $place "state" | default "/run/containerd") }}
{{- $noted := and $engine (or $remove .Values.installer.distribution) }}
{{- $root := "the files that it changes on the node are root's" }}
{{- $head := dict "context" . "name" "gpuhook-installer" "root" $root }}
{{- if include "gpuhook.restarts" . }}
{{- $head = merge $head (dict "account" "gpuhook-installer") }}
{{- end }}
{{- include "gpuhook.head" $head }}
      {{- if $outside }}
      # To signal the engine, or to run systemctl among the files of the node's first process. A separate
      # pod, because hostPID applies to a whole pod: the plugin sees no process of the node.
      hostPID: true
      {{- end }}
      initContainers:
        - name: installer
          {{- include "gpuhook.image" . | nindent 10 }}
          command: ["/usr/bin/install-node"]
          args: [{{ ternary "remove" "install" $remove }}]
          env:
            - name: INSTALL_NODE_ENGINE
              value: {{ ternary .Values.installer.engine "none" $engine }}
            - name: INSTALL_NODE_RESTART
              value: {{ .Values.installer.restart }}
            {{- if include "gpuhook.restarts" . }}
            - name: INSTALL_NODE_LEASE # one node after the other restarts its engine
              value: {{ printf "%s/gpuhook-engine-restart" .Release.Namespace | quote }}
            - name: INSTALL_NODE_HOLDER
              valueFrom:
                fieldRef: {fieldPath: spec.nodeName}
            {{- end }}
            {{- if and $engine .Values.installer.distribution }}
            - name: INSTALL_NODE_DISTRIBUTION
              value: {{ .Values.installer.distribution }}
            {{- end }}
            {{- if $engine }}
            - name: INSTALL_NODE_SETTINGS
              value: >-
                accept-nvidia-visible-devices-envvar-when-unprivileged={{ eq .Values.mode "environment" }}
                accept-nvidia-visible-devices-as-volume-mounts={{ ne .Values.mode "environment" }}
            {{- end }}
            {{- if $unit }}
            - name: INSTALL_NODE_PLUGIN
              value: "1"
            {{- include "gpuhook.options" . | nindent 12 }}
            {{- end }}
            {{- if and $unit .Values.mps }}
            - name: INSTALL_NODE_MPS
              value: "1"
            {{- end }}
            {{- if eq .Values.mode "nri" }}
            - name: INSTALL_NODE_NRI
              value: "1"
            {{- end }}
            {{- include "gpuhook.env" .Values.installer.env | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            {{- if and $outside (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) }}
            # The engine's own profile lets no pod signal or enter a process of the node.
            appArmorProfile: {type: Unconfined}
            {{- end }}
            capabilities:
              drop: ["ALL"]
              {{- if or $unit $remove (eq .Values.installer.restart "systemd") }}
              # To enter the node's files (setns(2)), and to see which program a process runs.
              add: ["SYS_ADMIN", "SYS_CHROOT", "SYS_PTRACE"]
              {{- end }}
          resources:
            requests: {cpu: 10m, memory: 64Mi}
            limits: {cpu: "1", memory: 256Mi}
          volumeMounts:
            - {name: programs, mountPath: /opt/gpuhook}
            - {name: settings, mountPath: /etc/gpuhook}
            - {name: config, mountPath: /config, readOnly: true}
            {{- if or $unit $remove }}
            - {name: units, mountPath: /etc/systemd/system}
            {{- else }}
            - {name: units, mountPath: /etc/systemd/system, readOnly: true}
            {{- end }}
            {{- if $engine }}
            - {name: {{ .Values.installer.engine }}, mountPath: {{ $folder | quote }}}
            - {name: state, mountPath: /var/lib/gpuhook}
            {{- end }}
            {{- if $remove }}
            - {name: cdi, mountPath: /var/run/cdi}
            {{- end }}
            {{- if $noted }}
            - {name: containers, mountPath: {{ $tasks }}, readOnly: true}
            {{- end }}
      containers:
        # It waits, so that the pod is ready when its node is done.
        {{- include "gpuhook.waits" (dict "context" . "name" "done") | nindent 8 }}
          {{- if $unit }}
          # The plugin's unit is active and registered; if not, an event of the pod says why.
          readinessProbe:
            exec: {command: ["/usr/bin/node-ready"]}
            periodSeconds: 15
            timeoutSeconds: 10
          volumeMounts:
            - {name: status, mountPath: /run/gpuhook, readOnly: true}
          {{- end }}
          resources:
            requests: {cpu: 1m, memory: 32Mi}
            limits: {cpu: 100m, memory: 64Mi}
      volumes:
        # gpuhook with its own interpreter.
        - name: programs
          hostPath: {path: /opt/gpuhook, type: DirectoryOrCreate}
        # gpuhook's settings.
        - name: settings
          hostPath: {path: /etc/gpuhook, type: DirectoryOrCreate}
        # Units of the node's systemd: the plugin's, if it is one.
        - name: units
          hostPath: {path: /etc/systemd/system, type: DirectoryOrCreate}
        - name: config
          configMap: {name: gpuhook-config, optional: true}
        {{- if $unit }}
        # The plugin's status, for the readiness probe.
        - name: status
          hostPath: {path: /run/gpuhook, type: DirectoryOrCreate}
        {{- end }}
        {{- if $engine }}
        # The engine's configuration, to which a runtime is added in a file of its own.
        - name: {{ .Values.installer.engine }}
          hostPath: {path: {{ $folder | quote }}, type: DirectoryOrCreate}
        # The record of all changes on the node, for the removal.
        - name: state
          hostPath: {path: /var/lib/gpuhook, type: DirectoryOrCreate}
        {{- end }}
        {{- if $remove }}
        # The plugin's CDI specs, which name a program that is removed.
        - name: cdi
          hostPath: {path: /var/run/cdi, type: DirectoryOrCreate}
        {{- end }}
        {{- if $noted }}
        # Which containers gpu-py created: they can't be stopped without it. Not the folder above, which
        # may be closed to all without capabilities.
        - name: containers
          hostPath: {path: {{ $tasks }}, type: DirectoryOrCreate}
        {{- end }}
{{- end }}
